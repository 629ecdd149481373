// Sixteen numbers at a time with AVX512: loading, storing, exponentials, and the row-wise work that needs them.

#pragma once

#include <limits>

#include "elementwise.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define PDSERVE_PRODUCTS 1
#include <immintrin.h>
#else
#define PDSERVE_PRODUCTS 0
#endif

constexpr int64_t kLane = 16;  // float32 numbers in a register

#if PDSERVE_PRODUCTS

inline void store_lane(float* target, __m512 values, __mmask16 mask) { _mm512_mask_storeu_ps(target, mask, values); }

inline void store_lane(bfloat16* target, __m512 values, __mmask16 mask) {
    _mm256_mask_storeu_epi16(target, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

inline __m512 load_lane(const bfloat16* source, __mmask16 mask) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __mmask16 lane_mask(int64_t num_left) { return num_left >= kLane ? 0xFFFF : __mmask16((1u << num_left) - 1); }

inline __m512 load_lane(const float* source, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, source); }

// e^x as 2^n * e^r with a polynomial of degree 5 (as Cephes expf): within 3 ulp; 0 below -87, NaN stays NaN.
inline __m512 exp_lane(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// 1 / x for positive x, within 2 ulp; 0 where x is infinite
inline __m512 inverse_lane(__m512 x) {
    const __m512 y = _mm512_rcp14_ps(x);
    const __m512 better = _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
    const __mmask16 is_infinite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(better, is_infinite, _mm512_setzero_ps());
}

// weights[i] = e^(scale * (scores[i] - greatest)) for the first `count`; returns their sum. Out may be scores itself.
template <typename Out>
inline float exp_weights(Out* weights, const float* scores, int64_t count, float scale) {
    __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < count; i += kLane) {
        const __mmask16 mask = lane_mask(count - i);
        top = _mm512_mask_max_ps(top, mask, top, load_lane(scores + i, mask));
    }
    const __m512 greatest = _mm512_set1_ps(_mm512_reduce_max_ps(top)), factor = _mm512_set1_ps(scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += kLane) {
        const __mmask16 mask = lane_mask(count - i);
        const __m512 e = exp_lane(_mm512_mul_ps(factor, _mm512_sub_ps(load_lane(scores + i, mask), greatest)));
        sum = _mm512_mask_add_ps(sum, mask, sum, e);
        store_lane(weights + i, e, mask);
    }
    return _mm512_reduce_add_ps(sum);
}

// target[i] = factor * source[i]
template <typename Out>
inline void scale_row(Out* target, const float* source, float factor, int64_t size) {
    for (int64_t i = 0; i < size; i += kLane) {
        const __mmask16 mask = lane_mask(size - i);
        store_lane(target + i, _mm512_mul_ps(load_lane(source + i, mask), _mm512_set1_ps(factor)), mask);
    }
}

// As `silu_mul_row` of elementwise.h.
inline void silu_mul_lanes(bfloat16* out, const bfloat16* gate_up, int64_t size) {
    for (int64_t i = 0; i < size; i += kLane) {
        const __mmask16 mask = lane_mask(size - i);
        const __m512 gate = load_lane(gate_up + i, mask), up = load_lane(gate_up + size + i, mask);
        const __m512 e = exp_lane(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        const __m512 sigmoid = inverse_lane(_mm512_add_ps(e, _mm512_set1_ps(1.0f)));
        store_lane(out + i, _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up), mask);
    }
}

#endif
