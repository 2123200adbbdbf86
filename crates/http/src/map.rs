//! The hash map of the request path.

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// A map with a fast hash function and a random seed.
pub type Map<K, V> = HashMap<K, V, RandomState>;
