// Attention of single new tokens over bfloat16 blocks by AVX512-BF16: 16 keys at a time, their dot products reduced
// together. Layout as in attention.h; as there, no result depends on threads or on what else is in the batch.

#pragma once

#include "attention.h"
#include "product.h"

#if PDSERVE_PRODUCTS

constexpr int64_t kKeys = 16;
constexpr int64_t kKeysAhead = 3 * kKeys;  // tokens that are fetched ahead of their use
constexpr int64_t kMaxGroup = 4;  // query heads whose sums of 64 dimensions stay in registers

// Sums of 16 registers, in their order.
inline __m512 sum_each(__m512* v) {
    for (int i = 0; i < 8; ++i)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    auto halve = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    };
    return halve(halve(v[0], v[1]), halve(v[2], v[3]));
}

// scores[0..16) = query . key of the 16 tokens at keys + offsets[..]; DIM is a multiple of 32
template <int DIM>
inline void score_keys(float* scores, const bfloat16* query, const bfloat16* keys, const int64_t* offsets) {
    __m512bh q[DIM / 32];
    for (int part = 0; part < DIM / 32; ++part) q[part] = (__m512bh)_mm512_loadu_si512(query + part * 32);
    __m512 sums[kKeys];
#pragma GCC unroll 16
    for (int token = 0; token < kKeys; ++token) {
        const bfloat16* key = keys + offsets[token];
        sums[token] = _mm512_setzero_ps();
        for (int part = 0; part < DIM / 32; ++part)
            sums[token] = _mm512_dpbf16_ps(sums[token], (__m512bh)_mm512_loadu_si512(key + part * 32), q[part]);
    }
    _mm512_storeu_ps(scores, sum_each(sums));
}

// The first 64 numbers of some tokens' rows, few at a time: a burst would fill the processor's list of misses, and
// computing would wait for memory instead of going on beside it (35.7 -> 31.1 ms for a step of batch 32).
inline void prefetch_rows(const bfloat16* rows, const int64_t* offsets, int64_t first, int64_t last, int64_t dim) {
    for (int64_t token = first; token < last; ++token)
        for (int64_t d = 0; d < dim; d += 32) _mm_prefetch((const char*)(rows + offsets[token] + d), _MM_HINT_T0);
}

// sums[g][0..64) += sum over 16 tokens of weights[g * stride + token] * value, for GROUP query heads. Values of two
// tokens are interleaved for the instruction, which leaves the sums in an order that `unweave` mends.
template <int GROUP>
void weigh_values(float* sums, int64_t sums_stride, const bfloat16* weights, int64_t stride, const bfloat16* values,
                  const int64_t* offsets) {
    __m512 totals[GROUP][4];
    for (int g = 0; g < GROUP; ++g)
        for (int part = 0; part < 4; ++part) totals[g][part] = _mm512_loadu_ps(sums + g * sums_stride + part * kLane);
    for (int token = 0; token < kKeys; token += 2) {
        const bfloat16 *first = values + offsets[token], *second = values + offsets[token + 1];
        prefetch_rows(values, offsets + kKeysAhead, token, token + 2, 64);
        __m512i pairs[4];
        for (int half = 0; half < 2; ++half) {
            const __m512i a = _mm512_loadu_si512(first + half * 32), b = _mm512_loadu_si512(second + half * 32);
            pairs[2 * half] = _mm512_unpacklo_epi16(a, b);
            pairs[2 * half + 1] = _mm512_unpackhi_epi16(a, b);
        }
        for (int g = 0; g < GROUP; ++g) {
            int32_t both;
            std::memcpy(&both, weights + g * stride + token, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
            for (int part = 0; part < 4; ++part)
                totals[g][part] = _mm512_dpbf16_ps(totals[g][part], weight, (__m512bh)pairs[part]);
        }
    }
    for (int g = 0; g < GROUP; ++g)
        for (int part = 0; part < 4; ++part) _mm512_storeu_ps(sums + g * sums_stride + part * kLane, totals[g][part]);
}

using WeighValues = void (*)(float*, int64_t, const bfloat16*, int64_t, const bfloat16*, const int64_t*);
constexpr WeighValues kWeighValues[kMaxGroup] = {weigh_values<1>, weigh_values<2>, weigh_values<3>, weigh_values<4>};

// 32 sums of `weigh_values`, times a factor, in order.
inline void unweave(bfloat16* out, const float* sums, float factor) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + kLane), by = _mm512_set1_ps(factor);
    store_lane(out, _mm512_mul_ps(_mm512_permutex2var_ps(a, first, b), by), 0xFFFF);
    store_lane(out + kLane, _mm512_mul_ps(_mm512_permutex2var_ps(a, second, b), by), 0xFFFF);
}

struct TokenScratch {
    std::vector<int64_t> offsets;  // of each token's row in K and V; those past the end repeat the last one
    std::vector<float> scores, sums, totals;
    std::vector<bfloat16> weights;

    void fit(int64_t num_tokens, int64_t num_rows, int64_t dim) {
        offsets.resize(num_tokens + kKeysAhead);
        scores.resize(num_tokens * num_rows);
        weights.assign(num_tokens * num_rows, bfloat16{0});
        sums.assign(num_rows * dim, 0.0f);
        totals.resize(num_rows);
    }
};

// As `attend_sequence` of attention.h, but weights are rounded to bfloat16. Blocks are read once each, all KV heads of
// a token together, and fetched ahead.
template <int DIM>
void attend_bf16(bfloat16* out, const bfloat16* q, Cache<bfloat16> cache, Heads heads, const int32_t* blocks,
                 int64_t first_token, int64_t last_token, float scale, int64_t first_head, int64_t last_head) {
    static thread_local TokenScratch scratch;
    const int64_t num_tokens = last_token - first_token, padded = (num_tokens + kKeys - 1) / kKeys * kKeys;
    const int64_t group = heads.num_heads / heads.num_kv_heads;
    const int64_t num_heads = last_head - first_head, num_rows = num_heads * group;
    scratch.fit(padded, num_rows, DIM);
    int64_t* offsets = scratch.offsets.data();
    int64_t block = first_token / cache.block_size, within = first_token % cache.block_size;
    for (int64_t token = 0; token < padded + kKeysAhead; ++token) {
        offsets[token] = (blocks[block] * cache.block_size + within) * heads.num_kv_heads * DIM;
        if (token + 1 >= num_tokens) continue;
        if (++within == cache.block_size) ++block, within = 0;
    }
    q += first_head * group * DIM, out += first_head * group * DIM;
    auto each_chunk = [&](const bfloat16* rows, auto visit) {
        rows += first_head * DIM;
        prefetch_rows(rows, offsets, 0, kKeysAhead, num_heads * DIM);
        for (int64_t token = 0; token < padded; token += kKeys)
            for (int64_t head = 0; head < num_heads; ++head) visit(token, head, rows + head * DIM);
    };
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    bfloat16* weights = scratch.weights.data();
    each_chunk(cache.k, [&](int64_t token, int64_t head, const bfloat16* keys) {
        for (int64_t g = 0; g < group; ++g) {
            const int64_t row = head * group + g, first = kKeys * g / group, last = kKeys * (g + 1) / group;
            prefetch_rows(keys, offsets + token + kKeysAhead, first, last, DIM);
            score_keys<DIM>(scores + row * padded + token, q + row * DIM, keys, offsets + token);
        }
    });
    for (int64_t row = 0; row < num_rows; ++row)
        scratch.totals[row] = exp_weights(weights + row * padded, scores + row * padded, num_tokens, scale);
    each_chunk(cache.v, [&](int64_t token, int64_t head, const bfloat16* values) {
        for (int64_t part = 0; part < DIM; part += 64)
            for (int64_t g = 0; g < group; g += kMaxGroup) {
                const int64_t row = head * group + g;
                kWeighValues[std::min(kMaxGroup, group - g) - 1](sums + row * DIM + part, DIM,
                                                                 weights + row * padded + token, padded,
                                                                 values + part, offsets + token);
            }
    });
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t d = 0; d < DIM; d += 32)
            unweave(out + row * DIM + d, sums + row * DIM + d, 1.0f / scratch.totals[row]);
}

inline Attend<bfloat16> attend_bf16_for(Heads heads) {
    if (heads.head_dim == 64) return attend_bf16<64>;
    if (heads.head_dim == 128) return attend_bf16<128>;
    if (heads.head_dim == 256) return attend_bf16<256>;
    return attend_for<bfloat16>(heads);
}

#endif
