// The greatest logit of a row, and the tokens that can win a draw with noise.

#pragma once

#include <algorithm>
#include <limits>

#include "numbers.h"

// lowbias32 of a token id under a row's key, see common/sampling/noise.py; the upper 23 bits.
inline uint32_t noise_bits(uint32_t token_id, uint32_t key_low, uint32_t key_high) {
    uint32_t bits = token_id * 0x9E3779B1u + key_low;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits ^= key_high;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    return (bits ^ (bits >> 16)) >> 9;
}

constexpr float kStep = 1.0f / 8388608.0f;  // 2^-23
constexpr int64_t kChunk = 256;

inline void best_of(const float* logits, int64_t size, float* best, int64_t* best_idx) {
    float top = -std::numeric_limits<float>::infinity();
    int64_t top_chunk = 0;
    int32_t num_nan = 0;
    for (int64_t first = 0; first < size; first += kChunk) {
        int64_t count = std::min(kChunk, size - first);
        float chunk = -std::numeric_limits<float>::infinity();
        int32_t nans = 0;
#pragma omp simd reduction(max : chunk) reduction(+ : nans)
        for (int64_t i = 0; i < count; ++i) {
            chunk = std::max(chunk, logits[first + i]);
            nans += logits[first + i] != logits[first + i];
        }
        if (chunk > top) top = chunk, top_chunk = first;
        num_nan += nans;
    }
    *best_idx = top_chunk;
    for (int64_t i = top_chunk; i < std::min(size, top_chunk + kChunk); ++i)
        if (logits[i] == top) {
            *best_idx = i;
            break;
        }
    *best = num_nan ? std::numeric_limits<float>::quiet_NaN() : top;
}
