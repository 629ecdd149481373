// What torch has no fast operator for on CPUs, called through ctypes; the caller checks every pointer and stride.
// Sums are in float32; a bfloat16 result is rounded once, at the end. No result depends on the number of threads or on
// what else is in the batch.

#include <omp.h>

#include <cstring>

#include "attention.h"
#include "dequantize.h"
#include "draw.h"
#include "elementwise.h"
#include "stack.h"

#define DISPATCH(...)       \
    if (is_bfloat16) {      \
        using T = bfloat16; \
        __VA_ARGS__;        \
    } else {                \
        using T = float;    \
        __VA_ARGS__;        \
    }

extern "C" {

void pdserve_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight, float eps,
                          int64_t num_rows, int64_t size, int is_bfloat16, int num_threads) {
    DISPATCH(add_rms_norm((T*)out, (T*)total, (const T*)x, (const T*)residual, (const T*)weight, eps, num_rows, size,
                          num_threads))
}

void pdserve_dequantize(void* out, const uint8_t* blocks, int64_t num_blocks, int64_t type, int is_bfloat16,
                        int num_threads) {
    DISPATCH(dequantize((T*)out, blocks, num_blocks, type, num_threads))
}

void pdserve_silu_mul(void* out, const void* gate_up, int64_t num_rows, int64_t size, int is_bfloat16,
                      int num_threads) {
    DISPATCH(silu_mul((T*)out, (const T*)gate_up, num_rows, size, num_threads))
}

void pdserve_rope_write(void* q_out, void* k_cache, void* v_cache, const void* q, const void* k, const void* v,
                        int64_t q_stride, int64_t k_stride, int64_t v_stride, const float* cos_sin,
                        const int64_t* positions, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                        int64_t num_kv_heads, int64_t head_dim, int is_bfloat16, int num_threads) {
    const int64_t strides[] = {q_stride, k_stride, v_stride};
    const Placement placement{cos_sin, positions, slots};
    DISPATCH(rope_write((T*)q_out, (T*)k_cache, (T*)v_cache, (const T*)q, (const T*)k, (const T*)v, strides, placement,
                        num_tokens, Heads{num_heads, num_kv_heads, head_dim}, num_threads))
}

void pdserve_decode_attention(void* out, const void* q, const void* k_cache, const void* v_cache, int64_t block_size,
                              int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const int32_t* cu_seqlens,
                              const int32_t* seq_lens, const int32_t* block_tables, int64_t table_stride,
                              int64_t num_seqs, int64_t window, float scale, int is_bfloat16, int num_threads) {
    const Sequences sequences{cu_seqlens, seq_lens, block_tables, table_stride, num_seqs};
    const Heads heads{num_heads, num_kv_heads, head_dim};
    DISPATCH(const Cache<T> cache{(const T*)k_cache, (const T*)v_cache, block_size};
             const DecodeTasks<T> tasks((T*)out, (const T*)q, cache, heads, sequences, window, scale, num_threads,
                                        attend_for<T>(heads));
             decode_attention(tasks, num_threads))
}

// Per row the greatest logit (NaN where any is) and the first token that has it.
void pdserve_best(const float* logits, int64_t row_stride, int64_t num_rows, int64_t size, float* best,
                  int64_t* best_idx, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; ++row)
        best_of(logits + row * row_stride, size, best + row, best_idx + row);
}

// Per row the tokens that can win logits / temperature + noise, ascending, one row's after the other's. `candidates` has
// room for `size` of each row.
void pdserve_draw_candidates(int32_t* candidates, int32_t* counts, const float* logits, int64_t row_stride,
                             const int64_t* rows, const float* temperatures, const int64_t* best_ids,
                             const uint32_t* keys_low, const uint32_t* keys_high, int64_t num_rows, int64_t size,
                             int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i)
        counts[i] = candidates_of(candidates + i * size, logits + rows[i] * row_stride, size, 1.0f / temperatures[i],
                                  best_ids[i], keys_low[i], keys_high[i]);
    int64_t end = 0;
    for (int64_t i = 0; i < num_rows; end += counts[i++])
        std::memmove(candidates + end, candidates + i * size, size_t(counts[i]) * sizeof(int32_t));
}

// Whether this processor computes products with packed bfloat16 weights; without, the functions below do nothing.
int pdserve_has_products() { return PDSERVE_PRODUCTS; }

int64_t pdserve_packed_bytes(int64_t num_out, int64_t num_in, int64_t bits) {
    return num_groups(num_out) * kGroup * num_in * bits / 8;
}

// `scales` as in quantized.h, null for 16 bits.
void pdserve_pack(void* target, uint16_t* scales, const void* weights, int64_t num_out, int64_t num_in, int64_t bits,
                  int num_threads) {
#if PDSERVE_PRODUCTS
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const Team team{omp_get_thread_num(), omp_get_num_threads(), nullptr};
        if (bits == 16)
            pack_product((uint16_t*)target, (const uint16_t*)weights, num_out, num_in, team);
        else if (bits == 8)
            quantize_weights<8>((uint8_t*)target, scales, (const bfloat16*)weights, num_out, num_in, team);
        else
            quantize_weights<4>((uint8_t*)target, scales, (const bfloat16*)weights, num_out, num_in, team);
    }
#endif
}

void pdserve_multiply(void* out, const void* x, int64_t num_rows, const void* product, int num_threads) {
#if PDSERVE_PRODUCTS
    static thread_local QuantizedRows scratch;
    QuantizedRows& rows = scratch;  // the caller's, for the whole team
    const Product& weights = *(const Product*)product;
    if (weights.bits < 16) rows.fit(num_rows, weights.num_in);
    Barrier barrier;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    multiply_any((bfloat16*)out, (const bfloat16*)x, num_rows, weights, rows,
                 Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
#endif
}

// out[num_rows][hidden_size] = what the chosen experts make of each row, by `shares`; choice and shares are
// [num_rows][num_active].
void pdserve_run_experts(void* out, const void* x, int64_t num_rows, const int64_t* choice, const float* shares,
                         const void* experts, int num_threads) {
#if PDSERVE_PRODUCTS
    static thread_local ExpertWork scratch;
    ExpertWork& work = scratch;  // the caller's, for the whole team
    const Experts& all = *(const Experts*)experts;
    work.fit(all, num_rows);
    std::copy(choice, choice + num_rows * all.num_active, work.choice.begin());
    std::copy(shares, shares + num_rows * all.num_active, work.shares.begin());
    Barrier barrier;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    ExpertRunner(all, work, num_rows, Team{omp_get_thread_num(), omp_get_num_threads(), &barrier})
        .run((bfloat16*)out, (const bfloat16*)x);
#endif
}

void pdserve_run_stack(const void* decoder, const void* step, int64_t first, int64_t last, int num_threads) {
#if PDSERVE_PRODUCTS
    static thread_local Workspace workspace;
    workspace.fit(*(const Decoder*)decoder, *(const Step*)step);
    StepRunner(*(const Decoder*)decoder, *(const Step*)step, workspace, num_threads).run(first, last);
#endif
}
}
