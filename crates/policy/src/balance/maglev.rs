//! The Maglev table: each endpoint has its own permutation of the entries, and the endpoints take entries in turn.

use super::{hash, normal::Normal};

/// Position of an endpoint in its permutation.
struct Permutation {
    index: u32,
    weight: f64,
    /// Weight at which the endpoint has its next turn.
    target: f64,
    at: u64,
    step: u64,
}

/// Builds a table of this size. The size is prime, so that each endpoint's steps reach every entry.
pub(super) fn build(endpoints: &Normal, size: u32) -> Box<[u32]> {
    const FREE: u32 = u32::MAX;
    let size = u64::from(size);
    let mut keys: Vec<_> = endpoints.0.iter().map(|one| (one.address.as_str(), one)).collect();
    // The order does not depend on the order in which the endpoints were sent.
    keys.sort_by(|a, b| a.0.cmp(b.0));
    let permutation = |(key, one): &(&str, &super::normal::WeightedEndpoint)| Permutation {
        index: one.index,
        weight: one.weight,
        target: 0.0,
        at: hash::of(key.as_bytes()) % size,
        step: hash::seeded(key.as_bytes(), 1) % (size - 1) + 1,
    };
    let mut permutations: Vec<Permutation> = keys.iter().map(permutation).collect();
    if permutations.is_empty() {
        return Box::default();
    }
    let max = endpoints.max();
    let mut table = vec![FREE; size as usize];
    let mut left = table.len();
    let mut turn = 1.0;
    while left > 0 {
        for permutation in &mut permutations {
            // An endpoint with half the maximum weight has every other turn.
            if left == 0 || turn * permutation.weight < permutation.target {
                continue;
            }
            permutation.target += max;
            while table[permutation.at as usize] != FREE {
                permutation.at = (permutation.at + permutation.step) % size;
            }
            table[permutation.at as usize] = permutation.index;
            left -= 1;
        }
        turn += 1.0;
    }
    table.into()
}

/// Returns the endpoint of a key; each further attempt takes another entry.
pub(super) fn find(table: &[u32], hash: u64, attempt: u32) -> Option<u32> {
    let hash = if attempt > 0 { hash ^ !u64::from(attempt - 1) } else { hash };
    table.get((hash % (table.len().max(1) as u64)) as usize).copied()
}
