// Attention of single new tokens over bfloat16 blocks by AVX512-BF16: 16 keys at a time, their dot products reduced
// together. The same layout and results independent of batch and threads as in attention.h; weights stay float32.

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

// scores[0..16) = query . key of 16 tokens; DIM is a multiple of 32
template <int DIM>
inline void score_keys(float* scores, const bfloat16* query, const bfloat16* const* keys) {
    __m512bh q[DIM / 32];
    for (int part = 0; part < DIM / 32; ++part) q[part] = (__m512bh)_mm512_loadu_si512(query + part * 32);
    __m512 sums[kKeys];
#pragma GCC unroll 16
    for (int key = 0; key < kKeys; ++key) {
        sums[key] = _mm512_setzero_ps();
        for (int part = 0; part < DIM / 32; ++part)
            sums[key] = _mm512_dpbf16_ps(sums[key], (__m512bh)_mm512_loadu_si512(keys[key] + part * 32), q[part]);
    }
    _mm512_storeu_ps(scores, sum_each(sums));
}

// sums[g][0..64) += sum over tokens of weights[g * stride + token] * values[token], for GROUP query heads
template <int GROUP>
void weigh_values(float* sums, int64_t sums_stride, const float* weights, int64_t stride, const bfloat16* const* values,
                  int64_t num_tokens) {
    __m512 totals[GROUP][4];
    for (int g = 0; g < GROUP; ++g)
        for (int part = 0; part < 4; ++part) totals[g][part] = _mm512_loadu_ps(sums + g * sums_stride + part * kLane);
    for (int64_t token = 0; token < num_tokens; ++token) {
        __m512 value[4];
        for (int part = 0; part < 4; ++part) value[part] = load_lane(values[token] + part * kLane, 0xFFFF);
        for (int g = 0; g < GROUP; ++g) {
            __m512 weight = _mm512_set1_ps(weights[g * stride + token]);
            for (int part = 0; part < 4; ++part) totals[g][part] = _mm512_fmadd_ps(weight, value[part], totals[g][part]);
        }
    }
    for (int g = 0; g < GROUP; ++g)
        for (int part = 0; part < 4; ++part) _mm512_storeu_ps(sums + g * sums_stride + part * kLane, totals[g][part]);
}

using WeighValues = void (*)(float*, int64_t, const float*, int64_t, const bfloat16* const*, int64_t);
constexpr WeighValues kWeighValues[kMaxGroup] = {weigh_values<1>, weigh_values<2>, weigh_values<3>, weigh_values<4>};

// Where the rows of 16 tokens lie. Those past the end repeat the last one, whose scores nobody reads.
struct Rows {
    const bfloat16* at[kKeys];

    Rows(const bfloat16* first, int64_t row_size, int64_t block_size, const int32_t* blocks, int64_t token,
         int64_t seq_len) {
        int64_t block = token / block_size, offset = token % block_size;
        for (int64_t i = 0; i < kKeys; ++i) {
            at[i] = first + (int64_t(blocks[block]) * block_size + offset) * row_size;
            if (token + i + 1 >= seq_len) continue;
            if (++offset == block_size) ++block, offset = 0;
        }
    }

    void prefetch(int64_t size) const {
        for (int64_t i = 0; i < kKeys; ++i)
            for (int64_t d = 0; d < size; d += 32) _mm_prefetch((const char*)(at[i] + d), _MM_HINT_T0);
    }

    Rows shifted(int64_t by) const {
        Rows result = *this;
        for (const bfloat16*& row : result.at) row += by;
        return result;
    }
};

// As `attend_sequence` of attention.h. Blocks are read once each, all KV heads of a token together, and fetched ahead.
template <int DIM>
void attend_bf16(bfloat16* out, const bfloat16* q, Cache<bfloat16> cache, Heads heads, const int32_t* blocks,
                 int64_t seq_len, float scale, int64_t first_head, int64_t last_head) {
    static thread_local std::vector<float> scratch;
    const int64_t group = heads.num_heads / heads.num_kv_heads, padded = (seq_len + kKeys - 1) / kKeys * kKeys;
    const int64_t num_heads = last_head - first_head, num_rows = num_heads * group;
    scratch.assign(num_rows * (padded + DIM), 0.0f);
    float *sums = scratch.data(), *scores = sums + num_rows * DIM;
    q += first_head * group * DIM, out += first_head * group * DIM;
    auto each_chunk = [&](const bfloat16* rows, auto visit) {
        auto rows_at = [&](int64_t token) {
            return Rows(rows + first_head * DIM, heads.num_kv_heads * DIM, cache.block_size, blocks, token, seq_len);
        };
        for (int64_t token = 0; token < std::min(kKeysAhead, seq_len); token += kKeys)
            rows_at(token).prefetch(num_heads * DIM);
        for (int64_t token = 0; token < seq_len; token += kKeys) {
            if (token + kKeysAhead < seq_len) rows_at(token + kKeysAhead).prefetch(num_heads * DIM);
            const Rows current = rows_at(token);
            for (int64_t head = 0; head < num_heads; ++head) visit(token, head, current.shifted(head * DIM));
        }
    };
    each_chunk(cache.k, [&](int64_t token, int64_t head, const Rows& keys) {
        for (int64_t row = head * group; row < (head + 1) * group; ++row)
            score_keys<DIM>(scores + row * padded + token, q + row * DIM, keys.at);
    });
    for (int64_t row = 0; row < num_rows; ++row) {
        float* weights = scores + row * padded;
        scale_row(weights, weights, 1.0f / exp_weights(weights, weights, seq_len, scale), seq_len);
    }
    each_chunk(cache.v, [&](int64_t token, int64_t head, const Rows& values) {
        for (int64_t part = 0; part < DIM; part += 64)
            for (int64_t g = 0; g < group; g += kMaxGroup) {
                int64_t row = head * group + g;
                kWeighValues[std::min(kMaxGroup, group - g) - 1](sums + row * DIM + part, DIM, scores + row * padded + token,
                                                                 padded, values.shifted(part).at,
                                                                 std::min(kKeys, seq_len - token));
            }
    });
    scale_row(out, sums, 1.0f, num_rows * DIM);
}

inline Attend<bfloat16> attend_bf16_for(Heads heads) {
    if (heads.head_dim == 64) return attend_bf16<64>;
    if (heads.head_dim == 128) return attend_bf16<128>;
    if (heads.head_dim == 256) return attend_bf16<256>;
    return attend_for<bfloat16>(heads);
}

#endif
