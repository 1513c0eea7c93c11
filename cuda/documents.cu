// Where the documents of packed rows lie, as cuDNN's ragged attention reads it, from borders (rows, docs + 1).
//
// Each row has `places` documents: its own, cut at `longest` tokens (as the padding after the last one may have to be),
// then empty ones at its end. lengths (N,) are in tokens, offsets (N + 1,) in elements of qkv, att and lse, with the end of
// the last row after all documents. A warp per row: a sum over lanes says how many pieces lie before a document's first.
//
// Architectures: 80 86 89 90 100 120
// Constants: QKV, ATT, LSE (elements of a token)

#include "common.cuh"
#include "constants"

extern "C" __global__ void __launch_bounds__(32)
    document_offsets(int* lengths, i64* qkv, i64* att, i64* lse, const int* borders, int rows, int docs, int places,
                     int length, int longest) {
    int row = blockIdx.x, lane = threadIdx.x;
    const int* border = borders + row * (docs + 1);
    auto put = [&](int n, int first, int count) {
        i64 token = static_cast<i64>(row) * length + first;
        qkv[n] = token * QKV;
        att[n] = token * ATT;
        lse[n] = token * LSE;
        if (n < rows * places) lengths[n] = count;
    };
    int next = row * places;  // free place
    for (int start = 0; start < docs; start += 32) {
        int d = start + lane, first = d < docs ? border[d] : length, end = d < docs ? border[d + 1] : length;
        int pieces = (end - first + longest - 1) / longest, before = pieces;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        for (int n = next + before - pieces; first < end; first += longest, n++) put(n, first, min(longest, end - first));
        next += __shfl_sync(0xffffffffu, before, 31);
    }
    for (int n = next + lane; n < (row + 1) * places + (row == rows - 1); n += 32) put(n, length, 0);
}
