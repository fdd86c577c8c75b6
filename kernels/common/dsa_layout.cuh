// What the launches of the certified DsaIndexSelect agree on.
#pragma once

// Scores are computed for blocks of kBlockKeys keys; masks and norms are kept a word of 32 keys at a time.
constexpr int kBlockKeys = 256;
constexpr int kBlockWords = kBlockKeys / 32;
constexpr int kMaxKeyBlocks = 1024;

// In the account of a row: some allowed key has a bias other than zero.
constexpr unsigned int kBiased = 1u << 31;

// What is known of 32 consecutive keys of a batch.
struct KeyWord {
    unsigned int irregular;  // bit i: the norm of key i is not finite
    float norm;              // no regular key has a greater Euclidean norm
};
