// float32 and bfloat16 numbers: loading, rounding, a fast exponential.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct bfloat16 { uint16_t bits; };

inline float load(float x) { return x; }

inline float load(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float& target, float value) { target = value; }

// Round to nearest even; NaN stays NaN.
inline void store(bfloat16& target, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    target.bits = uint16_t(value == value ? rounded : 0x7FC0);
}

// e^x by range reduction and a polynomial of degree 6 (Cephes expf): within 2 ulp, NaN stays NaN, vectorizes.
inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}
