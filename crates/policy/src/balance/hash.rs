//! Hashes as Envoy computes them, so that a key leads to the same endpoint in both proxies.

use xxhash_rust::xxh64::xxh64;

/// Returns the hash of a key.
pub fn of(key: &[u8]) -> u64 {
    xxh64(key, 0)
}

/// Returns the hash of a key with a seed.
pub(super) fn seeded(key: &[u8], seed: u64) -> u64 {
    xxh64(key, seed)
}

/// Returns the hash of several values of one header, whatever their order.
pub fn of_values(values: &mut [&[u8]]) -> u64 {
    values.sort_unstable();
    values.iter().fold(0, |seed, value| xxh64(value, seed))
}

/// Combines a hash with the hash of another key.
pub fn combine(hash: Option<u64>, more: u64) -> u64 {
    hash.map_or(0, |hash| hash.rotate_left(1)) ^ more
}

/// Returns the 64-bit MurmurHash2 of a key (`MurmurHash64A`), with the seed that libstdc++ uses for `std::hash`.
pub(super) fn murmur2(key: &[u8]) -> u64 {
    const SEED: u64 = 0xc70f_6907;
    const MULTIPLIER: u64 = 0xc6a4_a793_5bd1_e995;
    let mix = |value: u64| (value ^ (value >> 47)).wrapping_mul(MULTIPLIER);
    let mut hash = SEED ^ (key.len() as u64).wrapping_mul(MULTIPLIER);
    let mut words = key.chunks_exact(8);
    for word in &mut words {
        let word = word.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ mix(word.wrapping_mul(MULTIPLIER))).wrapping_mul(MULTIPLIER);
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        let rest = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ rest).wrapping_mul(MULTIPLIER);
    }
    let hash = mix(hash);
    hash ^ (hash >> 47)
}
