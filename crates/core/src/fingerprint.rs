//! Fingerprints of configuration texts. The control plane reports those it has read, and a reader compares them with
//! its own.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// Returns a hash that distinguishes texts of configuration files within one build of the programs.
pub fn fingerprint(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
