// A mixture of experts: the router's choice, the pairs of a row and one of its experts sorted by expert, and products
// with the weights of the experts that were chosen. A row's result depends on the row only: its experts are added up in
// the order of its choice.

#pragma once

#include <atomic>

#include "quantized.h"

#if PDSERVE_PRODUCTS

// As in common/engine/devices/cpu/native/experts.py. A product without weights is absent.
struct Experts {
    const Product *gate_up, *down;  // one for each expert
    int64_t num_experts, num_active, hidden_size, size;
    Product router, shared_gate_up, shared_down, shared_weight;
    int64_t is_sigmoid, is_normalized;
    float scale;
};

// Rows [first, last) of the sorted pairs, of one expert.
struct ExpertTile { int64_t expert, first, last; };

// Grows to the largest step.
struct ExpertWork {
    std::vector<float> logits, shares;        // [num_rows][num_experts], [num_rows][num_active]
    std::vector<int64_t> choice, places;      // of each pair: its expert, and where it stands among the sorted
    std::vector<int64_t> starts;              // of each expert among the sorted
    std::vector<ExpertTile> tiles;
    std::vector<bfloat16> gathered, wide, inner, results, shared, shared_logits;
    QuantizedRows quantized;
    std::atomic<int64_t> next_task[2];

    void fit(const Experts& experts, int64_t num_rows) {
        const int64_t num_pairs = num_rows * experts.num_active;
        const int64_t shared_size = experts.shared_down.weights ? experts.shared_down.num_in : 0;
        grow(logits, num_rows * experts.num_experts);
        grow(shares, num_pairs);
        grow(choice, num_pairs);
        grow(places, num_pairs);
        grow(gathered, num_pairs * experts.hidden_size);
        grow(wide, std::max(num_pairs * 2 * experts.size, num_rows * 2 * shared_size));
        grow(inner, std::max(num_pairs * experts.size, num_rows * shared_size));
        grow(results, num_pairs * experts.hidden_size);
        grow(shared, num_rows * experts.hidden_size);
        grow(shared_logits, num_rows);
        if (experts.down[0].bits < 16)
            quantized.fit(num_pairs, std::max({experts.hidden_size, experts.size, shared_size}));
    }

    template <typename T>
    static void grow(std::vector<T>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size);
    }
};

// The few greatest scores of one row, which is overwritten; ties go to the first expert.
inline void choose_experts(int64_t* chosen, float* shares, float* logits, const Experts& experts) {
    float top = logits[0], sum = 0, total = 0;
    for (int64_t e = 0; e < experts.num_experts; ++e) top = std::max(top, logits[e]);
    for (int64_t e = 0; e < experts.num_experts; ++e) {
        logits[e] = experts.is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - top);
        sum += logits[e];
    }
    for (int64_t k = 0; k < experts.num_active; ++k) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts.num_experts; ++e)
            if (logits[e] > logits[best]) best = e;
        chosen[k] = best;
        shares[k] = experts.is_sigmoid ? logits[best] : logits[best] / sum;
        total += shares[k];
        logits[best] = -1.0f;
    }
    const float factor = experts.is_normalized ? experts.scale / total : experts.scale;
    for (int64_t k = 0; k < experts.num_active; ++k) shares[k] *= factor;
}

// One layer's experts for the rows of a step, by the whole team. `work` fits.
class ExpertRunner {
  public:
    ExpertRunner(const Experts& experts, ExpertWork& work, int64_t num_rows, Team team)
        : experts_(experts), work_(work), num_rows_(num_rows), num_pairs_(num_rows * experts.num_active), team_(team) {}

    // By the router: fills choice and shares.
    void choose(const bfloat16* x) {
        multiply_any(work_.logits.data(), x, num_rows_, experts_.router, work_.quantized, team_);
        team_.wait();
        const int64_t k = experts_.num_active;
        team_.each(num_rows_, [&](int64_t row) {
            choose_experts(work_.choice.data() + row * k, work_.shares.data() + row * k,
                           work_.logits.data() + row * experts_.num_experts, experts_);
        });
        team_.wait();
    }

    // out[num_rows][hidden_size], of choice and shares; ends with all threads done.
    void run(bfloat16* out, const bfloat16* x) {
        const int64_t hidden = experts_.hidden_size, k = experts_.num_active;
        const bool has_shared = experts_.shared_down.weights;
        if (has_shared) run_shared(x);
        if (team_.thread == 0) sort();
        team_.wait();
        team_.each(num_pairs_, [&](int64_t pair) {
            std::memcpy(work_.gathered.data() + work_.places[pair] * hidden, x + pair / k * hidden,
                        hidden * sizeof(bfloat16));
        });
        team_.wait();
        multiply_pairs(work_.wide.data(), work_.gathered.data(), experts_.gate_up, 0);
        activate(num_pairs_, experts_.size);
        multiply_pairs(work_.results.data(), work_.inner.data(), experts_.down, 1);
        team_.each(num_rows_, [&](int64_t row) { add_up(out + row * hidden, row, has_shared); });
        team_.wait();
    }

  private:
    void run_shared(const bfloat16* x) {
        multiply_any(work_.wide.data(), x, num_rows_, experts_.shared_gate_up, work_.quantized, team_);
        if (experts_.shared_weight.weights)
            multiply(work_.shared_logits.data(), x, num_rows_, experts_.shared_weight, team_);
        team_.wait();
        activate(num_rows_, experts_.shared_down.num_in);
        multiply_any(work_.shared.data(), work_.inner.data(), num_rows_, experts_.shared_down, work_.quantized, team_);
        team_.wait();
    }

    void activate(int64_t num_rows, int64_t size) {
        team_.each(num_rows, [&](int64_t row) {
            silu_mul_lanes(work_.inner.data() + row * size, work_.wide.data() + row * 2 * size, size);
        });
        team_.wait();
    }

    void sort() {
        std::vector<int64_t>& starts = work_.starts;
        starts.assign(experts_.num_experts + 1, 0);
        for (int64_t pair = 0; pair < num_pairs_; ++pair) ++starts[work_.choice[pair] + 1];
        work_.tiles.clear();
        for (int64_t e = 0; e < experts_.num_experts; ++e) {
            starts[e + 1] += starts[e];
            for (int64_t first = starts[e]; first < starts[e + 1]; first += kRowChunk)
                work_.tiles.push_back({e, first, std::min(first + kRowChunk, starts[e + 1])});
        }
        for (int64_t pair = 0; pair < num_pairs_; ++pair) work_.places[pair] = starts[work_.choice[pair]]++;
        for (std::atomic<int64_t>& next : work_.next_task) next.store(0);
    }

    // Tiles have different numbers of rows: a thread takes the next one when it is done.
    void multiply_pairs(bfloat16* out, const bfloat16* x, const Product* products, int which) {
        const int64_t num_in = products[0].num_in, bits = products[0].bits;
        if (bits < 16) {
            team_.each(num_pairs_, [&](int64_t row) { work_.quantized.quantize(row, x + row * num_in, num_in, bits); });
            team_.wait();
        }
        const int64_t groups = num_groups(products[0].num_out), num_tasks = int64_t(work_.tiles.size()) * groups;
        for (int64_t task; (task = work_.next_task[which].fetch_add(1)) < num_tasks;) {
            const ExpertTile& tile = work_.tiles[task / groups];
            multiply_any_tile(out, x, work_.quantized, tile.first, tile.last, products[tile.expert], task % groups);
        }
        team_.wait();
    }

    void add_up(bfloat16* out, int64_t row, bool has_shared) {
        const int64_t hidden = experts_.hidden_size, k = experts_.num_active;
        const int64_t* places = work_.places.data() + row * k;
        const float* shares = work_.shares.data() + row * k;
        const bool is_weighted = experts_.shared_weight.weights;
        const float weight = is_weighted ? 1.0f / (1.0f + std::exp(-load(work_.shared_logits[row]))) : 1.0f;
        for (int64_t i = 0; i < hidden; i += kLane) {
            const __mmask16 mask = lane_mask(hidden - i);
            __m512 sum = _mm512_setzero_ps();
            for (int64_t e = 0; e < k; ++e)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(shares[e]),
                                      load_lane(work_.results.data() + places[e] * hidden + i, mask), sum);
            if (has_shared)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weight), load_lane(work_.shared.data() + row * hidden + i, mask),
                                      sum);
            store_lane(out + i, sum, mask);
        }
    }

    const Experts& experts_;
    ExpertWork& work_;
    const int64_t num_rows_, num_pairs_;
    const Team team_;
};

#endif
