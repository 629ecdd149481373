// Layers of a decoder in one go: their input in, KV written, logits out, or their output. The team stays together over all
// layers and meets at barriers, which is what makes small batches fast: there is no call, no thread start and no
// allocation between two layers. bfloat16 only; which layers, `is_known` of compiled.py says.

#pragma once

#include "attention_bf16.h"
#include "experts.h"
#include "prefill.h"
#include "quantized.h"

#if PDSERVE_PRODUCTS

// As in common/engine/devices/cpu/native/stack.py.
struct Layer {
    const bfloat16 *input_norm, *post_norm;
    const bfloat16 *q_norm, *k_norm;  // [head_dim], or null
    Product qkv, output, gate_up, down;  // the last two without weights where there are experts
    const Experts* experts;              // null: the one MLP
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    const float* cos_sin;
    const bfloat16* norm;  // of the tail, or null: then there is none
    Product head;
    float eps, scale;
};

struct Step {
    const int64_t *positions, *slots;
    const int32_t *cu_seqlens, *seq_lens, *block_tables;
    int64_t table_stride, num_seqs, num_tokens, block_size;
    bfloat16* const* keys;  // per layer
    bfloat16* const* values;
    const int64_t* rows;  // wanted past the last attention; ascending, each once
    int64_t num_rows;
    bfloat16 *hidden, *wanted, *delta, *queries;  // carried between calls; delta is what the last layer has yet to add
    float* logits;
};

// Grows to the largest step.
struct Workspace {
    std::vector<bfloat16> normed, wide, attended, activated, few_attended;
    std::vector<uint16_t> packed;  // K and V of the prompts of a layer
    QuantizedRows quantized;
    ExpertWork experts;

    void fit(const Decoder& model, const Step& step) {
        int64_t q_size = model.num_heads * model.head_dim, qkv_size = q_size + 2 * model.num_kv_heads * model.head_dim;
        grow(normed, step.num_tokens * model.hidden_size);
        grow(wide, step.num_tokens * std::max(qkv_size, 2 * model.intermediate_size));
        grow(attended, step.num_tokens * q_size);
        grow(activated, step.num_tokens * model.intermediate_size);
        grow(few_attended, step.num_rows * q_size);
        if (model.layers[0].experts) experts.fit(*model.layers[0].experts, step.num_tokens);
        if (model.layers[0].qkv.bits < 16)
            quantized.fit(step.num_tokens, std::max({model.hidden_size, model.intermediate_size, q_size}));
    }

    static void grow(std::vector<bfloat16>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

class StepRunner {
  public:
    StepRunner(const Decoder& model, const Step& step, Workspace& work, int num_threads)
        : model_(model), step_(step), work_(work), heads_{model.num_heads, model.num_kv_heads, model.head_dim},
          sequences_{step.cu_seqlens, step.seq_lens, step.block_tables, step.table_stride, step.num_seqs},
          prefill_(heads_, sequences_, model.scale, work.packed), num_threads_(num_threads),
          next_task_(model.num_layers) {}

    // Half layers [first, last): 2 n = layer n up to the KV write, 2 n + 1 = the rest of it. The last one gives logits,
    // or without a tail wanted and delta.
    void run(int64_t first, int64_t last) {
#pragma omp parallel num_threads(num_threads_) if (num_threads_ > 1)
        {
            Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier_};
            for (int64_t half = first; half < last; ++half)
                half % 2 == 0 ? write_kv(half / 2, team) : finish(half / 2, team);
        }
    }

  private:
    void write_kv(int64_t idx, Team team) {
        const Layer& layer = model_.layers[idx];
        const int64_t dim = model_.head_dim, q_size = model_.num_heads * dim, kv_size = model_.num_kv_heads * dim;
        add_norm(step_.hidden, idx ? step_.delta : nullptr, layer.input_norm, step_.num_tokens, team);
        product(work_.wide.data(), work_.normed.data(), step_.num_tokens, layer.qkv, team);
        Placement placement{model_.cos_sin, step_.positions, step_.slots};
        team.each(step_.num_tokens, [&](int64_t token) {
            bfloat16* q = work_.wide.data() + token * (q_size + 2 * kv_size);
            bfloat16 *k = q + q_size, *v = k + kv_size;
            if (layer.q_norm) norm_heads(q, layer.q_norm, model_.num_heads);
            if (layer.k_norm) norm_heads(k, layer.k_norm, model_.num_kv_heads);
            rope_write_token(step_.queries + token * q_size, step_.keys[idx], step_.values[idx], q, k, v, placement,
                             token, heads_);
        });
        team.wait();
    }

    void finish(int64_t idx, Team team) {
        const Layer& layer = model_.layers[idx];
        attend(idx, team);
        bool is_last = idx + 1 == model_.num_layers, is_few = is_last && step_.num_rows < step_.num_tokens;
        if (is_few) gather(team);
        bfloat16* hidden = is_few ? step_.wanted : step_.hidden;
        const bfloat16* attended = is_few ? work_.few_attended.data() : work_.attended.data();
        const int64_t num_rows = is_few ? step_.num_rows : step_.num_tokens;
        product(step_.delta, attended, num_rows, layer.output, team);
        add_norm(hidden, step_.delta, layer.post_norm, num_rows, team);
        layer.experts ? mixture(*layer.experts, num_rows, team) : mlp(layer, num_rows, team);
        if (!is_last || !model_.norm) return;
        add_norm(hidden, step_.delta, model_.norm, num_rows, team);
        product(step_.logits, work_.normed.data(), num_rows, model_.head, team);
    }

    // step_.delta = what the MLP makes of work_.normed
    void mlp(const Layer& layer, int64_t num_rows, Team team) {
        const int64_t size = model_.intermediate_size;
        product(work_.wide.data(), work_.normed.data(), num_rows, layer.gate_up, team);
        team.each(num_rows, [&](int64_t row) {
            silu_mul_lanes(work_.activated.data() + row * size, work_.wide.data() + row * 2 * size, size);
        });
        team.wait();
        product(step_.delta, work_.activated.data(), num_rows, layer.down, team);
    }

    void mixture(const Experts& experts, int64_t num_rows, Team team) {
        ExpertRunner runner(experts, work_.experts, num_rows, team);
        runner.choose(work_.normed.data());
        runner.run(step_.delta, work_.normed.data());
    }

    template <typename Out>
    void product(Out* out, const bfloat16* x, int64_t num_rows, const Product& weights, Team team) {
        multiply_any(out, x, num_rows, weights, work_.quantized, team);
        team.wait();
    }

    // hidden += delta, normed = norm(hidden) * weight; ends with all threads done.
    void add_norm(bfloat16* hidden, const bfloat16* delta, const bfloat16* weight, int64_t num_rows, Team team) {
        const int64_t size = model_.hidden_size;
        team.each(num_rows, [&](int64_t row) {
            bfloat16* x = hidden + row * size;
            if (delta) add_row(x, x, delta + row * size, size);
            rms_norm_row(work_.normed.data() + row * size, x, weight, model_.eps, size);
        });
        team.wait();
    }

    void norm_heads(bfloat16* x, const bfloat16* weight, int64_t num_heads) {
        for (int64_t head = 0; head < num_heads; ++head, x += model_.head_dim)
            rms_norm_row(x, x, weight, model_.eps, model_.head_dim);
    }

    void attend(int64_t idx, Team team) {
        static thread_local PrefillScratch scratch;
        Cache<bfloat16> cache{step_.keys[idx], step_.values[idx], step_.block_size};
        if (prefill_.num_packs()) {
            team.each(prefill_.num_packs(), [&](int64_t index) { prefill_.pack(index, cache); });
            team.wait();
        }
        DecodeTasks<bfloat16> decode(work_.attended.data(), step_.queries, cache, heads_, sequences_, 0, model_.scale,
                                     team.num_threads, attend_bf16_for(heads_));
        const bool has_decode = int64_t(prefill_.runs.size()) < step_.num_seqs;
        const int64_t num_decode = has_decode ? decode.count() : 0, num_tasks = num_decode + prefill_.num_tiles();
        for (int64_t task; (task = next_task_[idx].fetch_add(1)) < num_tasks;)
            if (task < num_decode)
                decode.run(task);
            else
                prefill_.attend(num_tasks - 1 - task, work_.attended.data(), step_.queries, scratch);
        team.wait();
    }

    void gather(Team team) {
        const int64_t hidden_size = model_.hidden_size, q_size = model_.num_heads * model_.head_dim;
        team.each(step_.num_rows, [&](int64_t row) {
            int64_t from = step_.rows[row];
            bfloat16 *hidden = step_.wanted + row * hidden_size, *attended = work_.few_attended.data();
            std::memcpy(hidden, step_.hidden + from * hidden_size, hidden_size * sizeof(bfloat16));
            std::memcpy(attended + row * q_size, work_.attended.data() + from * q_size, q_size * sizeof(bfloat16));
        });
        team.wait();
    }

    const Decoder& model_;
    const Step& step_;
    Workspace& work_;
    Heads heads_;
    Sequences sequences_;
    Prefill prefill_;
    int num_threads_;
    Barrier barrier_;
    std::vector<std::atomic<int64_t>> next_task_;
};

#endif
