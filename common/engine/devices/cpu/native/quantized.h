// Products with int8 and int4 weights: activations become int8 on the way, sums are exact integers over 64 (int8) or 32
// (int4) inputs and are scaled and added up in float32. A result depends on its row only, as in product.h.
//
// Packed layout: outputs in groups of 48 as in product.h. int8: [inputs / 4][48][4] of weight + 128. int4:
// [inputs / 8][48][4], the low half of a byte is (weight - least of the span) of one of the first four inputs, the high
// half that of the input four behind. Scales of each group of outputs: float16 [inputs / span][48], for int4
// [inputs / span][2][48], the second row being the span's least weight (as Q4_1 of GGUF has it: its weights stay).

#pragma once

#include "product.h"

#if PDSERVE_PRODUCTS

constexpr int64_t kIntRows = 4;  // rows computed at once: integer and float sums share the registers

template <int BITS>
constexpr int64_t kSpan = BITS == 8 ? 64 : 32;  // inputs that share a scale
template <int BITS>
constexpr int64_t kScaleRows = BITS == 8 ? 1 : 2;

inline int64_t span_of(int64_t bits) { return bits == 8 ? kSpan<8> : kSpan<4>; }

inline uint16_t half_bits(float value) { return uint16_t(_cvtss_sh(value, 0)); }
inline float from_half(uint16_t bits) { return _cvtsh_ss(bits); }

// One span of one output: packed[at(in)] for each input, its scale and, for int4, its least weight.
template <int BITS>
void quantize_span(uint8_t* packed, uint16_t* scales, const bfloat16* weights) {
    constexpr int64_t span = kSpan<BITS>;
    float least = load(weights[0]), most = least, odd = 0;
    for (int64_t in = 0; in < span; ++in) {
        least = std::min(least, load(weights[in]));
        most = std::max(most, load(weights[in]));
        odd += 0 * load(weights[in]);
    }
    if (odd != 0) {  // NaN: a weight that is not finite makes every product with its span so
        scales[0] = half_bits(odd);
        if (BITS == 4) scales[kGroup] = half_bits(odd);
        return;
    }
    const float start = BITS == 8 ? 0.0f : from_half(half_bits(least));
    const float range = BITS == 8 ? std::max(-least, most) / 127.0f : (most - start) / 15.0f;
    scales[0] = half_bits(range);
    if (BITS == 4) scales[kGroup] = half_bits(least);
    const float scale = from_half(scales[0]), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int64_t in = 0; in < span; ++in) {
        const float value = std::nearbyint((load(weights[in]) - start) * inverse);
        if (BITS == 8) {
            packed[in / 4 * 4 * kGroup + in % 4] = uint8_t(int(std::min(std::max(value, -127.0f), 127.0f)) + 128);
        } else {
            uint8_t& both = packed[in / 8 * 4 * kGroup + in % 4];
            both |= uint8_t(int(std::min(std::max(value, 0.0f), 15.0f)) << (in % 8 < 4 ? 0 : 4));
        }
    }
}

// weights[num_out][num_in] bfloat16 -> packed and scales, groups of outputs spread over the team
template <int BITS>
void quantize_weights(uint8_t* target, uint16_t* scales, const bfloat16* weights, int64_t num_out, int64_t num_in,
                      Team team) {
    constexpr int64_t span = kSpan<BITS>, span_bytes = span * kGroup * BITS / 8;
    const int64_t num_spans = num_in / span, num_scales = num_spans * kScaleRows<BITS> * kGroup;
    team.each(num_groups(num_out), [&](int64_t group) {
        uint8_t* packed = target + group * num_spans * span_bytes;
        uint16_t* of_group = scales + group * num_scales;
        std::memset(packed, 0, num_spans * span_bytes);
        std::memset(of_group, 0, num_scales * sizeof(uint16_t));
        for (int64_t column = 0; column < std::min(kGroup, num_out - group * kGroup); ++column)
            for (int64_t index = 0; index < num_spans; ++index)
                quantize_span<BITS>(packed + index * span_bytes + column * 4,
                                    of_group + index * kScaleRows<BITS> * kGroup + column,
                                    weights + (group * kGroup + column) * num_in + index * span);
    });
}

// Rows of int8 with a scale of each span, and the sum of its numbers: times the weights' offset for 8 bits, for 4 bits
// times the scale.
struct QuantizedRows {
    std::vector<int8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> starts;  // 8 bits: what the integer sums start from
    std::vector<float> sums;      // 4 bits: what the least weight is multiplied with

    void fit(int64_t num_rows, int64_t num_in) {
        if (int64_t(values.size()) < num_rows * num_in) values.resize(num_rows * num_in);
        const int64_t num_spans = num_rows * num_in / kSpan<4>;
        if (int64_t(scales.size()) >= num_spans) return;
        scales.resize(num_spans);
        starts.resize(num_spans);
        sums.resize(num_spans);
    }

    void quantize(int64_t row, const bfloat16* x, int64_t num_in, int64_t bits) {
        const int64_t span = span_of(bits), num_spans = num_in / span;
        const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
        for (int64_t index = 0; index < num_spans; ++index) {
            __m512 part[4];
            __m512i top = _mm512_setzero_si512();  // as integers, which order NaN above all numbers: it is kept
            for (int64_t lane = 0; lane < span / kLane; ++lane) {
                part[lane] = load_lane(x + index * span + lane * kLane, 0xFFFF);
                top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(part[lane]), magnitude));
            }
            const int32_t top_bits = _mm512_reduce_max_epi32(top);
            float greatest;
            std::memcpy(&greatest, &top_bits, sizeof greatest);
            const __m512 factor = _mm512_set1_ps(greatest > 0 ? 127.0f / greatest : 0.0f);
            __m512i sum = _mm512_setzero_si512();
            for (int64_t lane = 0; lane < span / kLane; ++lane) {
                const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(part[lane], factor));
                sum = _mm512_add_epi32(sum, rounded);
                _mm_storeu_si128((__m128i*)(values.data() + row * num_in + index * span + lane * kLane),
                                 _mm512_cvtsepi32_epi8(rounded));
            }
            scales[row * num_spans + index] = greatest / 127.0f;
            const int32_t total = _mm512_reduce_add_epi32(sum);
            starts[row * num_spans + index] = bits == 8 ? -128 * total : 0;
            sums[row * num_spans + index] = greatest / 127.0f * float(total);
        }
    }
};

inline __m512 load_half(const uint16_t* source) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source)); }

// sum += dot products of four unsigned weights and four signed inputs. In assembly because GCC 12 copies the sums of
// its intrinsic to and fro, which halves the rate.
inline __m512i dot_fours(__m512i sum, __m512i weights, __m512i inputs) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
    return sum;
}

// sums[r][lane] += weights[lane] . four inputs of row r
template <int ROWS, int LANES>
[[gnu::always_inline]] inline void dot_rows(__m512i (&sums)[ROWS][LANES], const __m512i (&weights)[LANES],
                                            const int8_t* const (&values)[ROWS], int64_t at) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        int32_t four;
        std::memcpy(&four, values[r] + at, 4);
        const __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 3
        for (int lane = 0; lane < LANES; ++lane) sums[r][lane] = dot_fours(sums[r][lane], weights[lane], inputs);
    }
}

// ROWS rows, from `row` on, times one group of outputs.
template <int BITS, int ROWS, typename Out>
void multiply_int_block(Out* out, int64_t out_stride, const QuantizedRows& x, int64_t row, const uint8_t* weights,
                        const uint16_t* scales, const bfloat16* bias, int64_t num_in, int64_t num_out) {
    constexpr int64_t span = kSpan<BITS>;
    constexpr int lanes = kGroup / kLane;
    const int64_t num_spans = num_in / span;
    const __m512i low = _mm512_set1_epi8(0x0F);
    __m512 sums[ROWS][lanes];
    for (int lane = 0; lane < lanes; ++lane) {
        const int64_t left = std::max<int64_t>(num_out - lane * kLane, 0);
        const __m512 start = bias ? load_lane(bias + lane * kLane, lane_mask(left)) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; ++r) sums[r][lane] = start;
    }
    for (int64_t index = 0; index < num_spans; ++index, scales += kScaleRows<BITS> * kGroup) {
        __m512i totals[ROWS][lanes];
        const int8_t* values[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            values[r] = x.values.data() + (row + r) * num_in + index * span;
#pragma GCC unroll 3
            for (int lane = 0; lane < lanes; ++lane)
                totals[r][lane] = _mm512_set1_epi32(x.starts[(row + r) * num_spans + index]);
        }
        for (int64_t in = 0; in < span; in += 32 / BITS, weights += 4 * kGroup) {
            __m512i w[lanes], high[lanes];
            for (int lane = 0; lane < lanes; ++lane) {
                w[lane] = _mm512_loadu_si512(weights + lane * 64);
                _mm_prefetch((const char*)(weights + lane * 64) + kAhead, _MM_HINT_T0);
                if (BITS == 4) {
                    high[lane] = _mm512_and_si512(_mm512_srli_epi16(w[lane], 4), low);
                    w[lane] = _mm512_and_si512(w[lane], low);
                }
            }
            dot_rows(totals, w, values, in);
            if (BITS == 4) dot_rows(totals, high, values, in + 4);
        }
#pragma GCC unroll 3
        for (int lane = 0; lane < lanes; ++lane) {
            const __m512 scale = load_half(scales + lane * kLane);
            const __m512 least = BITS == 4 ? load_half(scales + kGroup + lane * kLane) : scale;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[(row + r) * num_spans + index]));
                sums[r][lane] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[r][lane]), both, sums[r][lane]);
                if (BITS == 4)
                    sums[r][lane] =
                        _mm512_fmadd_ps(least, _mm512_set1_ps(x.sums[(row + r) * num_spans + index]), sums[r][lane]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int lane = 0; lane < lanes && lane * kLane < num_out; ++lane)
            store_lane(out + r * out_stride + lane * kLane, sums[r][lane], lane_mask(num_out - lane * kLane));
}

template <typename Out>
using IntBlock = void (*)(Out*, int64_t, const QuantizedRows&, int64_t, const uint8_t*, const uint16_t*,
                          const bfloat16*, int64_t, int64_t);

template <int BITS, typename Out>
constexpr IntBlock<Out> kIntBlocks[kIntRows] = {multiply_int_block<BITS, 1, Out>, multiply_int_block<BITS, 2, Out>,
                                                multiply_int_block<BITS, 3, Out>, multiply_int_block<BITS, 4, Out>};

// As `multiply_tile` of product.h.
template <int BITS, typename Out>
void multiply_int_tile(Out* out, const QuantizedRows& x, int64_t first, int64_t last, const Product& product,
                       int64_t group) {
    const int64_t group_bytes = kGroup * product.num_in * BITS / 8, column = group * kGroup;
    const int64_t group_scales = product.num_in / kSpan<BITS> * kScaleRows<BITS> * kGroup;
    for (int64_t row = first; row < last; row += kIntRows)
        kIntBlocks<BITS, Out>[std::min(kIntRows, last - row) - 1](
            out + row * product.num_out + column, product.num_out, x, row,
            (const uint8_t*)product.weights + group * group_bytes, product.scales + group * group_scales,
            product.bias ? product.bias + column : nullptr, product.num_in, std::min(kGroup, product.num_out - column));
}

// For weights of any width; those of fewer bits take their rows from `quantized`.
template <typename Out>
void multiply_any_tile(Out* out, const bfloat16* x, const QuantizedRows& quantized, int64_t first, int64_t last,
                       const Product& product, int64_t group) {
    if (product.bits == 16) return multiply_tile(out, x, first, last, product, group);
    if (product.bits == 8) return multiply_int_tile<8>(out, quantized, first, last, product, group);
    multiply_int_tile<4>(out, quantized, first, last, product, group);
}

// This thread's share, as `multiply` of product.h; all rows are in `x`.
template <int BITS, typename Out>
void multiply_int(Out* out, const QuantizedRows& x, int64_t num_rows, const Product& product, Team team) {
    const int64_t groups = num_groups(product.num_out), chunks = (num_rows + kRowChunk - 1) / kRowChunk;
    team.each(groups * chunks, [&](int64_t task) {
        const int64_t first = task / groups * kRowChunk;
        multiply_int_tile<BITS>(out, x, first, std::min(first + kRowChunk, num_rows), product, task % groups);
    });
}

// out[num_rows][num_out] = x * weights + bias for weights of any width, by the whole team; `rows` is shared scratch
// that fits. Threads may still be at work when one returns.
template <typename Out>
void multiply_any(Out* out, const bfloat16* x, int64_t num_rows, const Product& product, QuantizedRows& rows,
                  Team team) {
    if (product.bits == 16) return multiply(out, x, num_rows, product, team);
    team.each(num_rows, [&](int64_t row) {
        rows.quantize(row, x + row * product.num_in, product.num_in, product.bits);
    });
    team.wait();
    if (product.bits == 8)
        multiply_int<8>(out, rows, num_rows, product, team);
    else
        multiply_int<4>(out, rows, num_rows, product, team);
}

#endif
