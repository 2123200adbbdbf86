//! The hash ring: each endpoint has many entries, and a key leads to the next entry at or after its hash.

use std::io::Write as _;

use super::{hash, normal::Normal};
use crate::config::cluster::HashFunction;

/// Builds the ring. The endpoint of the smallest weight gets its share of `minimum` entries, rounded up. The others
/// get entries in proportion to their weights, up to `maximum` entries in total.
pub(super) fn build(
    endpoints: &Normal,
    minimum: u64,
    maximum: u64,
    function: HashFunction,
) -> Box<[(u64, u32)]> {
    let min = endpoints.min();
    let scale = ((min * minimum as f64).ceil() / min).min(maximum as f64);
    let mut ring = Vec::new();
    let (mut placed, mut target) = (0.0, 0.0);
    let mut key = Vec::new();
    for one in &endpoints.0 {
        target += scale * one.weight;
        let mut number = 0_u64;
        while placed < target {
            key.clear();
            // Writing into memory cannot fail.
            let _ = write!(key, "{}_{number}", one.address);
            let hash = match function {
                HashFunction::Xx => hash::of(&key),
                HashFunction::Murmur2 => hash::murmur2(&key),
            };
            ring.push((hash, one.index));
            number += 1;
            placed += 1.0;
        }
    }
    ring.sort_unstable();
    ring.into()
}

/// Returns the endpoint of a key; each further attempt takes the next entry.
pub(super) fn find(ring: &[(u64, u32)], hash: u64, attempt: u32) -> Option<u32> {
    if ring.is_empty() {
        return None;
    }
    // After the last entry, the ring continues with the first.
    let at = ring.partition_point(|entry| entry.0 < hash) % ring.len() + attempt as usize;
    Some(ring[at % ring.len()].1)
}
