//! Waiting for something to become true.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Far beyond what anything takes, even on a busy machine: a test that waits this long has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// Looks until there is something to return. What `look` says is missing becomes the failure's message.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        // A look that takes the whole time does not decide alone.
        let late = Instant::now() > deadline;
        match look() {
            Ok(found) => return found,
            Err(missing) if late => panic!("{what}: {missing}"),
            Err(_) => thread::park_timeout(LOOK),
        }
    }
}
