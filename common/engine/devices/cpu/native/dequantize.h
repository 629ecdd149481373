// Quantized blocks of GGUF files to numbers. Layouts: ggml-quants.h of the ggml repository; results are bit for bit
// those of its Python library, since no product below has more bits than a float32 holds but those of Q6_K, which has
// no sum.

#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>

#include "numbers.h"

inline float half(const uint8_t* bytes) {
    uint32_t bits = uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8;
    uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    float value;
    if (exponent == 0) {
        value = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    std::memcpy(&value, &wide, 4);
    return value;
}

struct Q4_0 {
    static constexpr int size = 32, bytes = 18;
    static void read(float* out, const uint8_t* block) {
        float d = half(block);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * float(int(block[2 + i] & 15) - 8);
            out[16 + i] = d * float(int(block[2 + i] >> 4) - 8);
        }
    }
};

struct Q4_1 {
    static constexpr int size = 32, bytes = 20;
    static void read(float* out, const uint8_t* block) {
        float d = half(block), m = half(block + 2);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * float(block[4 + i] & 15) + m;
            out[16 + i] = d * float(block[4 + i] >> 4) + m;
        }
    }
};

// The fifth bit of each of 32 values, with its weight.
inline void fifth_bits(int* out, const uint8_t* bits) {
    uint32_t all;
    std::memcpy(&all, bits, 4);
    for (int i = 0; i < 32; ++i) out[i] = int(all >> i & 1) << 4;
}

struct Q5_0 {
    static constexpr int size = 32, bytes = 22;
    static void read(float* out, const uint8_t* block) {
        float d = half(block);
        int high[32];
        fifth_bits(high, block + 2);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * float((int(block[6 + i] & 15) | high[i]) - 16);
            out[16 + i] = d * float((int(block[6 + i] >> 4) | high[16 + i]) - 16);
        }
    }
};

struct Q5_1 {
    static constexpr int size = 32, bytes = 24;
    static void read(float* out, const uint8_t* block) {
        float d = half(block), m = half(block + 2);
        int high[32];
        fifth_bits(high, block + 4);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * float(int(block[8 + i] & 15) | high[i]) + m;
            out[16 + i] = d * float(int(block[8 + i] >> 4) | high[16 + i]) + m;
        }
    }
};

struct Q8_0 {
    static constexpr int size = 32, bytes = 34;
    static void read(float* out, const uint8_t* block) {
        float d = half(block);
        for (int i = 0; i < 32; ++i) out[i] = float(int8_t(block[2 + i])) * d;
    }
};

struct Q2_K {
    static constexpr int size = 256, bytes = 84;
    static void read(float* out, const uint8_t* block) {
        float d = half(block + 80), dmin = half(block + 82);
        for (int part = 0; part < 16; ++part) {  // 16 values each
            const uint8_t* bits = block + 16 + part / 8 * 32 + part % 2 * 16;
            int shift = part / 2 % 4 * 2;
            float dl = d * float(block[part] & 15), ml = dmin * float(block[part] >> 4);
            for (int i = 0; i < 16; ++i) out[part * 16 + i] = dl * float(bits[i] >> shift & 3) - ml;
        }
    }
};

struct Q3_K {
    static constexpr int size = 256, bytes = 110;
    static void read(float* out, const uint8_t* block) {
        const uint8_t *mask = block, *quants = block + 32, *scales = block + 96;
        float d = half(block + 108);
        for (int part = 0; part < 16; ++part) {
            int low = part < 8 ? scales[part] & 15 : scales[part - 8] >> 4;
            int scale = (low | (scales[8 + part % 4] >> part / 4 * 2 & 3) << 4) - 32;
            const uint8_t* bits = quants + part / 8 * 32 + part % 2 * 16;
            int shift = part / 2 % 4 * 2, bit = part / 2;
            float dl = d * float(scale);
            for (int i = 0; i < 16; ++i) {
                int without = mask[part % 2 * 16 + i] >> bit & 1 ? 0 : 4;
                out[part * 16 + i] = dl * float(int(bits[i] >> shift & 3) - without);
            }
        }
    }
};

// The six-bit scale and minimum of one of eight parts of a Q4_K or Q5_K block.
inline void scale_and_min(int part, const uint8_t* packed, int* scale, int* min) {
    if (part < 4) {
        *scale = packed[part] & 63;
        *min = packed[part + 4] & 63;
    } else {
        *scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
        *min = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
    }
}

struct Q4_K {
    static constexpr int size = 256, bytes = 144;
    static void read(float* out, const uint8_t* block) {
        float d = half(block), dmin = half(block + 2);
        for (int part = 0; part < 8; ++part) {
            int scale, min;
            scale_and_min(part, block + 4, &scale, &min);
            float dl = d * float(scale), ml = dmin * float(min);
            const uint8_t* bits = block + 16 + part / 2 * 32;
            int shift = part % 2 * 4;
            for (int i = 0; i < 32; ++i) out[part * 32 + i] = dl * float(bits[i] >> shift & 15) - ml;
        }
    }
};

struct Q5_K {
    static constexpr int size = 256, bytes = 176;
    static void read(float* out, const uint8_t* block) {
        float d = half(block), dmin = half(block + 2);
        for (int part = 0; part < 8; ++part) {
            int scale, min;
            scale_and_min(part, block + 4, &scale, &min);
            float dl = d * float(scale), ml = dmin * float(min);
            const uint8_t *high = block + 16, *bits = block + 48 + part / 2 * 32;
            int shift = part % 2 * 4;
            for (int i = 0; i < 32; ++i)
                out[part * 32 + i] = dl * float((bits[i] >> shift & 15) | (high[i] >> part & 1) << 4) - ml;
        }
    }
};

struct Q6_K {
    static constexpr int size = 256, bytes = 210;
    static void read(float* out, const uint8_t* block) {
        const int8_t* scales = (const int8_t*)(block + 192);
        float d = half(block + 208);
        for (int part = 0; part < 16; ++part) {
            const uint8_t* low = block + part / 8 * 64 + part % 4 * 16;
            const uint8_t* high = block + 128 + part / 8 * 32 + part % 2 * 16;
            int low_shift = part / 4 % 2 * 4, high_shift = part / 2 % 4 * 2;
            float dl = d * float(scales[part]);
            for (int i = 0; i < 16; ++i)
                out[part * 16 + i] = dl * float(int((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
        }
    }
};

constexpr float kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
    static constexpr int size = 32, bytes = 18;
    static void read(float* out, const uint8_t* block) {
        float d = half(block);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * kIQ4Values[block[2 + i] & 15];
            out[16 + i] = d * kIQ4Values[block[2 + i] >> 4];
        }
    }
};

struct IQ4_XS {
    static constexpr int size = 256, bytes = 136;
    static void read(float* out, const uint8_t* block) {
        float d = half(block);
        int high = block[2] | block[3] << 8;
        for (int part = 0; part < 8; ++part) {
            int scale = (block[4 + part / 2] >> part % 2 * 4 & 15) | (high >> part * 2 & 3) << 4;
            float dl = d * float(scale - 32);
            const uint8_t* bits = block + 8 + part * 16;
            for (int i = 0; i < 16; ++i) {
                out[part * 32 + i] = dl * kIQ4Values[bits[i] & 15];
                out[part * 32 + 16 + i] = dl * kIQ4Values[bits[i] >> 4];
            }
        }
    }
};

template <typename Block, typename T>
void dequantize_blocks(T* out, const uint8_t* blocks, int64_t num_blocks, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t idx = 0; idx < num_blocks; ++idx) {
        float values[Block::size];
        Block::read(values, blocks + idx * Block::bytes);
        for (int i = 0; i < Block::size; ++i) store(out[idx * Block::size + i], values[i]);
    }
}

// `type`: the id that ggml.h gives it; the caller passes only those below.
template <typename T>
void dequantize(T* out, const uint8_t* blocks, int64_t num_blocks, int64_t type, int num_threads) {
    switch (type) {
        case 2: return dequantize_blocks<Q4_0>(out, blocks, num_blocks, num_threads);
        case 3: return dequantize_blocks<Q4_1>(out, blocks, num_blocks, num_threads);
        case 6: return dequantize_blocks<Q5_0>(out, blocks, num_blocks, num_threads);
        case 7: return dequantize_blocks<Q5_1>(out, blocks, num_blocks, num_threads);
        case 8: return dequantize_blocks<Q8_0>(out, blocks, num_blocks, num_threads);
        case 10: return dequantize_blocks<Q2_K>(out, blocks, num_blocks, num_threads);
        case 11: return dequantize_blocks<Q3_K>(out, blocks, num_blocks, num_threads);
        case 12: return dequantize_blocks<Q4_K>(out, blocks, num_blocks, num_threads);
        case 13: return dequantize_blocks<Q5_K>(out, blocks, num_blocks, num_threads);
        case 14: return dequantize_blocks<Q6_K>(out, blocks, num_blocks, num_threads);
        case 20: return dequantize_blocks<IQ4_NL>(out, blocks, num_blocks, num_threads);
        case 23: return dequantize_blocks<IQ4_XS>(out, blocks, num_blocks, num_threads);
    }
}
