//! Maglev's table: each endpoint has an order of its own in which it wants the entries, and they take turns.

use super::{hash, normal::Normal};

/// What an endpoint wants.
struct Wish {
    index: u32,
    weight: f64,
    /// The weight at which it has its next turn.
    target: f64,
    at: u64,
    step: u64,
}

/// Fills a table of this size, which is prime, so that each endpoint's steps lead to every entry.
pub(super) fn build(endpoints: &Normal, size: u32) -> Box<[u32]> {
    const FREE: u32 = u32::MAX;
    let size = u64::from(size);
    let mut keys: Vec<_> = endpoints.0.iter().map(|one| (one.address.to_string(), one)).collect();
    // In an order that does not depend on the one in which they were sent.
    keys.sort_by(|a, b| a.0.cmp(&b.0));
    let wish = |(key, one): &(String, &super::normal::Weighed)| Wish {
        index: one.index,
        weight: one.weight,
        target: 0.0,
        at: hash::of(key.as_bytes()) % size,
        step: hash::seeded(key.as_bytes(), 1) % (size - 1) + 1,
    };
    let mut wishes: Vec<Wish> = keys.iter().map(wish).collect();
    if wishes.is_empty() {
        return Box::default();
    }
    let most = endpoints.most();
    let mut table = vec![FREE; size as usize];
    let mut left = table.len();
    let mut turn = 1.0;
    while left > 0 {
        for wish in &mut wishes {
            // Who has half the weight of the weightiest has every other turn.
            if left == 0 || turn * wish.weight < wish.target {
                continue;
            }
            wish.target += most;
            while table[wish.at as usize] != FREE {
                wish.at = (wish.at + wish.step) % size;
            }
            table[wish.at as usize] = wish.index;
            left -= 1;
        }
        turn += 1.0;
    }
    table.into()
}

/// Where a key leads to, and another place for each attempt after the first.
pub(super) fn find(table: &[u32], hash: u64, attempt: u32) -> Option<u32> {
    let hash = if attempt > 0 { hash ^ !u64::from(attempt - 1) } else { hash };
    table.get((hash % (table.len().max(1) as u64)) as usize).copied()
}
