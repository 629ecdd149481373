// Causal attention of many new tokens of a sequence, as products: scores = queries * keys, output = weights * values.
// K and V of the sequence are packed like weights once a layer; scores are float32, weights are rounded to bfloat16.

#pragma once

#include <vector>

#include "attention.h"
#include "product.h"

#if PDSERVE_PRODUCTS

constexpr int64_t kTileRows = 32;  // new tokens of one head at once

// Several new tokens of one sequence.
struct Run {
    int64_t seq, first_row, num_new, seq_len, packed_at;  // packed_at: where its K and V lie in `packed`
};

struct PrefillScratch {
    std::vector<float> scores, sums;
    std::vector<bfloat16> weights;
};

// Attention of all runs of a step; run_of_task etc. are spread over the team by the caller.
struct Prefill {
    Heads heads;
    Sequences sequences;
    float scale;
    std::vector<Run> runs;
    std::vector<int64_t> first_task;  // per run, of its tiles; one more for the end
    uint16_t* packed;

    // `buffer` grows to what is needed, and may hold anything: all that is read of it is packed before.
    Prefill(Heads heads, Sequences sequences, float scale, std::vector<uint16_t>& buffer)
        : heads(heads), sequences(sequences), scale(scale) {
        int64_t size = 0;
        first_task.push_back(0);
        for (int64_t seq = 0; seq < sequences.num_seqs; ++seq) {
            int64_t num_new = sequences.num_new(seq), seq_len = sequences.seq_lens[seq];
            if (num_new <= 1) continue;
            runs.push_back({seq, sequences.cu_seqlens[seq], num_new, seq_len, size});
            size += heads.num_kv_heads * (keys_size(seq_len) + values_size(seq_len));
            first_task.push_back(first_task.back() + heads.num_heads * ((num_new + kTileRows - 1) / kTileRows));
        }
        if (int64_t(buffer.size()) < size) buffer.resize(size);
        packed = buffer.data();
    }

    int64_t num_packs() const { return int64_t(runs.size()) * heads.num_kv_heads; }
    int64_t num_tiles() const { return first_task.back(); }

    int64_t keys_size(int64_t seq_len) const { return num_groups(seq_len) * kGroup * heads.head_dim; }
    int64_t values_size(int64_t seq_len) const { return num_groups(heads.head_dim) * kGroup * even(seq_len); }
    static int64_t even(int64_t size) { return (size + 1) / 2 * 2; }

    uint16_t* keys(const Run& run, int64_t kv_head) {
        return packed + run.packed_at + kv_head * (keys_size(run.seq_len) + values_size(run.seq_len));
    }
    uint16_t* values(const Run& run, int64_t kv_head) { return keys(run, kv_head) + keys_size(run.seq_len); }

    // K and V of one KV head of one run, from the blocks.
    void pack(int64_t index, Cache<bfloat16> cache) {
        const Run& run = runs[index / heads.num_kv_heads];
        int64_t kv_head = index % heads.num_kv_heads, dim = heads.head_dim, length = even(run.seq_len);
        uint16_t *k = keys(run, kv_head), *v = values(run, kv_head);
        const int32_t* blocks = sequences.blocks(run.seq);
        std::memset(v, 0, values_size(run.seq_len) * sizeof(uint16_t));
        for (int64_t token = 0; token < num_groups(run.seq_len) * kGroup; ++token) {
            uint16_t* key = k + token / kGroup * kGroup * dim + token % kGroup * 2;
            if (token >= run.seq_len) {
                for (int64_t d = 0; d < dim; d += 2) std::memset(key + d * kGroup, 0, 4);
                continue;
            }
            int64_t slot = int64_t(blocks[token / cache.block_size]) * cache.block_size + token % cache.block_size;
            int64_t at = (slot * heads.num_kv_heads + kv_head) * dim;
            for (int64_t d = 0; d < dim; d += 2) std::memcpy(key + d * kGroup, cache.k + at + d, 4);
            for (int64_t d = 0; d < dim; ++d)
                v[d / kGroup * kGroup * length + token / 2 * 2 * kGroup + d % kGroup * 2 + token % 2] =
                    cache.v[at + d].bits;
        }
    }

    // One tile of one query head.
    void attend(int64_t task, bfloat16* out, const bfloat16* q, PrefillScratch& scratch) {
        int64_t idx = std::upper_bound(first_task.begin(), first_task.end(), task) - first_task.begin() - 1;
        const Run& run = runs[idx];
        int64_t num_tiles = (run.num_new + kTileRows - 1) / kTileRows;
        int64_t head = (task - first_task[idx]) / num_tiles, first = (task - first_task[idx]) % num_tiles * kTileRows;
        int64_t rows = std::min(kTileRows, run.num_new - first), past = run.seq_len - run.num_new + first;
        int64_t visible = even(past + rows), stride = heads.num_heads * heads.head_dim;
        int64_t at = (run.first_row + first) * stride + head * heads.head_dim;
        int64_t kv_head = head / (heads.num_heads / heads.num_kv_heads), dim = heads.head_dim;
        scratch.scores.resize(rows * visible);
        scratch.weights.resize(rows * visible);
        for (int64_t column = 0; column < visible; column += kGroup)
            multiply_group(scratch.scores.data() + column, visible, q + at, stride, rows,
                           keys(run, kv_head) + column * dim, nullptr, dim / 2, std::min(kGroup, visible - column));
        float totals[kTileRows];
        for (int64_t row = 0; row < rows; ++row)
            totals[row] = weigh(scratch.weights.data() + row * visible, scratch.scores.data() + row * visible,
                                past + row + 1, visible);
        scratch.sums.resize(rows * dim);
        for (int64_t column = 0; column < dim; column += kGroup)
            multiply_group(scratch.sums.data() + column, dim, scratch.weights.data(), visible, rows,
                           values(run, kv_head) + column * even(run.seq_len), nullptr, visible / 2,
                           std::min(kGroup, dim - column));
        for (int64_t row = 0; row < rows; ++row)
            scale_row(out + at + row * stride, scratch.sums.data() + row * dim, 1.0f / totals[row], dim);
    }

    // Softmax over the first `count` scores but for the division by its sum, which is returned; others weigh nothing.
    float weigh(bfloat16* weights, const float* scores, int64_t count, int64_t size) const {
        float sum = exp_weights(weights, scores, count, scale);
        std::memset(weights + count, 0, (size - count) * sizeof(bfloat16));
        return sum;
    }
};

#endif
