// SwiGLU's gradient, and with it of an adapter of gate and one of up both gradients that low_rank.cu makes of theirs, which
// are read in shared memory: memory sees them as fp8 rows alone, if nothing else reads their value.
//
// A block owns TILES * 64 tokens and some of the blocks of 64 columns of each half. Of a tile (64 tokens, 64 columns) d_act,
// gate and up come through shared memory, STAGES of them under way; the gradients take the places of gate and up. Half of
// the warps then multiplies the tile of gate, the other that of up, as in low_rank.cu: a warp takes 16 tokens, then 16
// columns.
//
// Architectures: 80 86 89 90 100 120
// Constants: ACTIVATION (activation.cuh), FORMS and E4M3 (forms.cuh; no COPY, COL or SUMS), R (16 or 32), TILES, STAGES, BLOCKS
// (to a multiprocessor)

#include "activation.cuh"
#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "low_rank.cuh"

constexpr int THREADS = 256, TOKENS = 64, COLUMNS = 64, LANES = COLUMNS / 8;  // that have 8 numbers each of a row
constexpr int TILE_BYTES = 2 * TOKENS * COLUMNS, STAGE_BYTES = 3 * TILE_BYTES;
constexpr int LOW_BYTES = 2 * TILES * TOKENS * R, UP_BYTES = 2 * COLUMNS * R;  // of a half

// low_parts (2,across,M,R), up_parts (2,groups of tokens,F,R): of gate, then of up <- d_act (M,F), gate_up (M,2F), of each
// half low (M,R) and up (F,R). Blocks go by columns first.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    swiglu_low_rank_backward(OUTPUT_PARAMETERS(bf16, d_gate_up), float* low_parts, float* up_parts, const bf16* d_act,
                             const bf16* gate_up, const bf16* gate_low, const bf16* up_low, const bf16* gate_b,
                             const bf16* up_b, i64 low_pitch, int rows, int columns, int across, int per_block) {
    extern __shared__ __align__(128) u8 memory[];
    u32 tiles = static_cast<u32>(__cvta_generic_to_shared(memory)), lows = tiles + STAGES * STAGE_BYTES;
    u32 ups = lows + 2 * LOW_BYTES;  // of two blocks of columns
    int side = blockIdx.x % across, group = blockIdx.x / across, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_token = group * TILES * TOKENS, first_column = side * per_block * COLUMNS, half = warp / 4;
    int count = min(per_block, (columns - first_column + COLUMNS - 1) / COLUMNS);
    int row_of_thread = threadIdx.x / LANES, piece_of_thread = threadIdx.x % LANES;
    int place = piece_at<COLUMNS>(row_of_thread, piece_of_thread);
    constexpr int STEP = THREADS / LANES, STEP_BYTES = STEP * 2 * COLUMNS;  // from a thread's row of a tile to the next
    auto begin_reading = [&](int n) {
        if (n < count * TILES) {
            int token = first_token + n % TILES * TOKENS + row_of_thread, block_column = first_column + n / TILES * COLUMNS;
            int column = block_column + piece_of_thread * 8, left = column < columns ? rows - token : 0;
            u32 to = tiles + n % STAGES * STAGE_BYTES + place;
            const bf16* d = d_act + static_cast<i64>(token) * columns + column;
            const bf16* gate = gate_up + static_cast<i64>(token) * 2 * columns + column;
#pragma unroll
            for (int i = 0; i < TOKENS / STEP; i++) {
                bool there = i * STEP < left;
                i64 next = static_cast<i64>(i * STEP) * columns;
                copy(to + i * STEP_BYTES, there ? d + next : d_act, there);
                copy(to + i * STEP_BYTES + TILE_BYTES, there ? gate + 2 * next : gate_up, there);
                copy(to + i * STEP_BYTES + 2 * TILE_BYTES, there ? gate + 2 * next + columns : gate_up, there);
            }
            if (n % TILES == 0) {
#pragma unroll
                for (int i = threadIdx.x; i < 2 * UP_BYTES / 16; i += THREADS) {
                    int part = i / (UP_BYTES / 16), row = i / (R / 8) % COLUMNS, piece = i % (R / 8);
                    const bf16* from = part ? up_b : gate_b;
                    bool there = block_column + row < columns;
                    copy(ups + (n / TILES % 2 * 2 + part) * UP_BYTES + low_at(row, piece),
                         there ? from + (block_column + row) * R + piece * 8 : from, there);
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * LOW_BYTES / 16; i += THREADS) {
        int part = i / (LOW_BYTES / 16), row = i / (R / 8) % (TILES * TOKENS), piece = i % (R / 8);
        const bf16* from = part ? up_low : gate_low;
        bool there = first_token + row < rows;
        copy(lows + part * LOW_BYTES + low_at(row, piece), there ? from + (first_token + row) * low_pitch + piece * 8 : from, there);
    }
#pragma unroll 1
    for (int n = 0; n < STAGES - 1; n++) begin_reading(n);
    Sink<bf16, FORMS, E4M3> sink(OUTPUT(bf16, d_gate_up));
    sink.begin_at(static_cast<i64>(first_token + row_of_thread) * 2 * columns + first_column + piece_of_thread * 8);
    // of 16 rows of a matrix the one whose address this lane gives, and which 16 bytes, as in low_rank.cu
    int own_row = lane % 8 + lane / 8 % 2 * 8, own_piece = lane / 16, turned_row = lane % 8 + lane / 16 * 8, turned = lane / 8 % 2;
    u32 of_half = (1 + half) * TILE_BYTES, own_tile = piece_at<COLUMNS>(warp % 4 * 16 + own_row, own_piece);
    u32 turned_tile = piece_at<COLUMNS>(turned_row, warp % 4 * 2 + turned);
    u32 own_up = ups + half * UP_BYTES + low_at(own_row, own_piece), own_low = lows + half * LOW_BYTES + low_at(own_row, own_piece);
    float low_sums[TILES][R / 8][4] = {};
#pragma unroll 1
    for (int block = 0; block < count; block++) {
        float up_sums[R / 8][4] = {};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int n = block * TILES + tile;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            begin_reading(n + STAGES - 1);
            u8* own = memory + n % STAGES * STAGE_BYTES + place;
            int left = first_column + block * COLUMNS + piece_of_thread * 8 < columns
                           ? rows - first_token - tile * TOKENS - row_of_thread
                           : 0;
#pragma unroll
            for (int i = 0; i < TOKENS / STEP; i++) {
                bf16* at = reinterpret_cast<bf16*>(own + i * STEP_BYTES);
                float d[8], gate[8], up[8];
                load(at, d), load(at + TILE_BYTES / 2, gate), load(at + TILE_BYTES, up);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    Activated<ACTIVATION> of_gate(gate[j]);
                    gate[j] = d[j] * up[j] * of_gate.slope();
                    up[j] = d[j] * of_gate.value;
                }
                if (i * STEP < left) {
                    u32 bytes[2];
                    i64 index = static_cast<i64>(tile * TOKENS + i * STEP) * 2 * columns + block * COLUMNS;
                    sink.put(index, gate, bytes);
                    sink.put(index + columns, up, bytes);
                }
                keep(at + TILE_BYTES / 2, gate), keep(at + TILE_BYTES, up);
            }
            __syncthreads();
            u32 from = tiles + n % STAGES * STAGE_BYTES + of_half, up_from = own_up + block % 2 * 2 * UP_BYTES;
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++) {
                u32 left[4];
                load_rows(left, from + (own_tile ^ 32 * k));
                add_product(low_sums[tile], left, up_from, 16 * k);
            }
#pragma unroll
            for (int k = 0; k < TOKENS / 16; k++) {
                u32 left[4];
                load_columns(left, from + turned_tile + 32 * COLUMNS * k);
                add_product(up_sums, left, own_low, tile * TOKENS + 16 * k);
            }
        }
        int groups = gridDim.x / across;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = first_column + block * COLUMNS + warp % 4 * 16 + 8 * i + lane / 4;
            if (column >= columns) continue;
            float* to = up_parts + (static_cast<i64>(half * groups + group) * columns + column) * R + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < R / 8; j++) store_two(to + 8 * j, up_sums[j][2 * i], up_sums[j][2 * i + 1]);
        }
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int token = first_token + tile * TOKENS + warp % 4 * 16 + 8 * i + lane / 4;
            if (token >= rows) continue;
            float* to = low_parts + (static_cast<i64>(half * across + side) * rows + token) * R + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < R / 8; j++) store_two(to + 8 * j, low_sums[tile][j][2 * i], low_sums[tile][j][2 * i + 1]);
        }
    sink.finish();
}
