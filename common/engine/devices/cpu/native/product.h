// Products of bfloat16 rows with packed bfloat16 weights, by the dot products of AVX512-BF16.
//
// Packed layout: outputs in groups of 48, the last one padded with zeros; of a group, for each pair of inputs the pairs
// of all 48 outputs: [inputs / 2][48][2]. A group is read from end to end, so one row costs no more than reading the
// weights, and eight rows keep 24 registers of sums busy. Each output is one chain of sums in the order of the inputs:
// it depends neither on the number of threads nor on the other rows.

#pragma once

#include <cstring>

#include "lanes.h"
#include "team.h"

constexpr int64_t kGroup = 48;       // outputs of a group
constexpr int64_t kRowBlock = 8;     // rows computed at once
constexpr int64_t kRowChunk = 128;   // rows that stay in the second-level cache while all groups pass
constexpr int64_t kAhead = 4096;     // bytes that weights are prefetched ahead: 150 instead of 130 tok/s at one row

// As in common/engine/devices/cpu/native/products.py.
struct Product {
    const uint16_t* weights;  // packed; of fewer bits as in quantized.h
    const uint16_t* scales;   // null for bfloat16
    const bfloat16* bias;     // [num_out], or null
    int64_t num_out, num_in;  // num_in is even, for fewer bits a multiple of 64
    int64_t bits;             // 16 = bfloat16, 8, 4
};

inline int64_t num_groups(int64_t num_out) { return (num_out + kGroup - 1) / kGroup; }

// weights[out * stride + in] -> packed, [num_groups * num_in * 48]
inline void pack_group(uint16_t* target, const uint16_t* weights, int64_t stride, int64_t num_out, int64_t num_in) {
    for (int64_t column = 0; column < kGroup; ++column)
        for (int64_t in = 0; in < num_in; in += 2) {
            uint32_t pair = 0;
            if (column < num_out) std::memcpy(&pair, weights + column * stride + in, 4);
            std::memcpy(target + in * kGroup + column * 2, &pair, 4);
        }
}

inline void pack_product(uint16_t* target, const uint16_t* weights, int64_t num_out, int64_t num_in, Team team) {
    team.each(num_groups(num_out), [&](int64_t group) {
        int64_t first = group * kGroup;
        pack_group(target + first * num_in, weights + first * num_in, num_in, std::min(kGroup, num_out - first),
                   num_in);
    });
}

#if PDSERVE_PRODUCTS

// ROWS rows times the first LANES * 16 outputs of a group, of which num_out are wanted; bias may be null.
template <int ROWS, int LANES, typename Out>
void multiply_block(Out* out, int64_t out_stride, const bfloat16* x, int64_t x_stride, const uint16_t* weights,
                    const bfloat16* bias, int64_t num_pairs, int64_t num_out) {
    __m512 sums[ROWS][LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        __m512 start = bias ? load_lane(bias + lane * kLane, lane_mask(num_out - lane * kLane)) : _mm512_setzero_ps();
        for (int row = 0; row < ROWS; ++row) sums[row][lane] = start;
    }
    for (int64_t pair = 0; pair < num_pairs; ++pair, weights += 2 * kGroup) {
        __m512i w[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            w[lane] = _mm512_loadu_si512(weights + lane * 2 * kLane);
            _mm_prefetch((const char*)(weights + lane * 2 * kLane) + kAhead, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            int32_t both;
            std::memcpy(&both, x + row * x_stride + 2 * pair, 4);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 3
            for (int lane = 0; lane < LANES; ++lane)
                sums[row][lane] = _mm512_dpbf16_ps(sums[row][lane], inputs, (__m512bh)w[lane]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int lane = 0; lane < LANES; ++lane)
            store_lane(out + row * out_stride + lane * kLane, sums[row][lane], lane_mask(num_out - lane * kLane));
}

template <typename Out>
using Block = void (*)(Out*, int64_t, const bfloat16*, int64_t, const uint16_t*, const bfloat16*, int64_t, int64_t);

template <typename Out, int LANES>
constexpr Block<Out> kBlocksOfRows[kRowBlock] = {
    multiply_block<1, LANES, Out>, multiply_block<2, LANES, Out>, multiply_block<3, LANES, Out>,
    multiply_block<4, LANES, Out>, multiply_block<5, LANES, Out>, multiply_block<6, LANES, Out>,
    multiply_block<7, LANES, Out>, multiply_block<8, LANES, Out>,
};

template <typename Out>
constexpr const Block<Out>* kBlocks[3] = {kBlocksOfRows<Out, 1>, kBlocksOfRows<Out, 2>, kBlocksOfRows<Out, 3>};

// Rows times the first num_out outputs of one group, in blocks of nearly equal numbers of rows.
template <typename Out>
void multiply_group(Out* out, int64_t out_stride, const bfloat16* x, int64_t x_stride, int64_t num_rows,
                    const uint16_t* weights, const bfloat16* bias, int64_t num_pairs, int64_t num_out) {
    const Block<Out>* blocks = kBlocks<Out>[(num_out + kLane - 1) / kLane - 1];
    int64_t num_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
    for (int64_t block = 0; block < num_blocks; ++block) {
        int64_t first = num_rows * block / num_blocks, last = num_rows * (block + 1) / num_blocks;
        blocks[last - first - 1](out + first * out_stride, out_stride, x + first * x_stride, x_stride, weights, bias,
                                 num_pairs, num_out);
    }
}

// Rows [first, last) times one group of outputs.
template <typename Out>
void multiply_tile(Out* out, const bfloat16* x, int64_t first, int64_t last, const Product& product, int64_t group) {
    const int64_t column = group * kGroup;
    multiply_group(out + first * product.num_out + column, product.num_out, x + first * product.num_in, product.num_in,
                   last - first, product.weights + column * product.num_in,
                   product.bias ? product.bias + column : nullptr, product.num_in / 2,
                   std::min(kGroup, product.num_out - column));
}

// This thread's share of out[num_rows][num_out] = x[num_rows][num_in] * weights + bias, everything contiguous.
template <typename Out>
void multiply(Out* out, const bfloat16* x, int64_t num_rows, const Product& product, Team team) {
    const int64_t groups = num_groups(product.num_out), chunks = (num_rows + kRowChunk - 1) / kRowChunk;
    team.each(groups * chunks, [&](int64_t task) {
        const int64_t row = task / groups * kRowChunk;
        multiply_tile(out, x, row, std::min(row + kRowChunk, num_rows), product, task % groups);
    });
}

#endif
