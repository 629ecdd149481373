// The greatest logit of a row, and the tokens that can win a draw with noise.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"

// lowbias32 of a token id under a row's key, see common/engine/sampling/noise.py; the upper 23 bits.
inline uint32_t noise_bits(uint32_t token_id, uint32_t key_low, uint32_t key_high) {
    uint32_t bits = token_id * 0x9E3779B1u + key_low;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits ^= key_high;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    return (bits ^ (bits >> 16)) >> 9;
}

// At least e^x, and up to 6 % more: 2^(n + f) <= 2^n (1 + f), which is a float's exponent beside its mantissa.
inline float exp_above(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const int32_t bits = int32_t(x * 12102203.16f) + 0x3F800000;  // 2^23 / ln 2
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}

constexpr float kStep = 1.0f / 8388608.0f;  // 2^-23
constexpr int64_t kChunk = 256;

// The first place of a value, or 0.
inline int64_t first_of(const float* logits, int64_t size, float value) {
    for (int64_t first = 0; first < size; first += kChunk) {
        const int64_t end = std::min(size, first + kChunk);
        int32_t num_found = 0;
        for (int64_t i = first; i < end; ++i) num_found += logits[i] == value;
        if (num_found) return std::find(logits + first, logits + end, value) - logits;
    }
    return 0;
}

// Lane by lane, which the compiler turns into vector instructions; as one reduction it took longer (GCC 12).
inline void best_of(const float* logits, int64_t size, float* best, int64_t* best_idx) {
    constexpr int64_t kLanes = 64;
    float tops[kLanes];
    int32_t nans[kLanes] = {};
    std::fill_n(tops, kLanes, -std::numeric_limits<float>::infinity());
    const auto take = [&](int64_t lane, float logit) {
        tops[lane] = logit > tops[lane] ? logit : tops[lane];
        nans[lane] |= logit != logit;
    };
    const int64_t whole = size / kLanes * kLanes;
    for (int64_t first = 0; first < whole; first += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) take(lane, logits[first + lane]);
    for (int64_t i = whole; i < size; ++i) take(i - whole, logits[i]);
    const float top = *std::max_element(tops, tops + kLanes);
    const bool is_finite = std::find(nans, nans + kLanes, 1) == nans + kLanes;
    *best = is_finite ? top : std::numeric_limits<float>::quiet_NaN();
    *best_idx = first_of(logits, size, top);
}

// A sum less a margin wider than every rounding in it, and than what two logarithms differ by.
inline float surely(float sum) { return sum - 1e-3f - 4e-6f * std::fabs(sum); }

// The tokens that can win logits * inverse + noise, ascending; returns how many: one, but for ties within the margin of
// `surely`. The best token's sum is a floor, which each token found raises; those that the last one rules out are dropped
// at the end. noise(u) <= -log(1 - u) because -log(u) >= 1 - u, so a token below floor - noise cannot win.
inline int32_t candidates_of(int32_t* found, const float* logits, int64_t size, float inverse, int64_t best_idx,
                             uint32_t key_low, uint32_t key_high) {
    const auto sum_of = [&](int64_t token_id) {
        const float u = (float(noise_bits(uint32_t(token_id), key_low, key_high)) + 0.5f) * kStep;
        return logits[token_id] * inverse - std::log(-std::log(u));
    };
    int32_t num_found = 0;
    float floor = surely(sum_of(best_idx));
    for (int64_t first = 0; first < size; first += kChunk) {
        const int64_t length = std::min(kChunk, size - first);
        int32_t may_win[kChunk];
        int32_t num_winners = 0;
#pragma omp simd reduction(+ : num_winners)
        for (int64_t t = 0; t < length; ++t) {
            float distance = logits[first + t] * inverse - floor;
            uint32_t bits = noise_bits(uint32_t(first + t), key_low, key_high);
            float rest = (8388607.5f - float(int32_t(bits))) * kStep;  // 1 - u, at least 2^-24
            int32_t wins = rest <= exp_above(distance) * 1.0001f;
            may_win[t] = wins;
            num_winners += wins;
        }
        if (num_winners == 0) continue;
        for (int64_t t = 0; t < length; ++t) {
            if (!may_win[t]) continue;
            const float sum = sum_of(first + t);
            if (sum < floor) continue;
            found[num_found++] = int32_t(first + t);
            floor = std::max(floor, surely(sum));
        }
    }
    return int32_t(std::remove_if(found, found + num_found, [&](int32_t token_id) { return sum_of(token_id) < floor; }) -
                   found);
}
