//! Waits for a condition.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Time after which a wait has failed: far longer than anything takes, even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(20);

/// Calls `look` until it returns a value. Its last error becomes the message of the failure.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        // The last call must start after the deadline, so that a single slow call does not decide alone.
        let late = Instant::now() > deadline;
        match look() {
            Ok(found) => return found,
            Err(missing) if late => panic!("{what}: {missing}"),
            Err(_) => thread::park_timeout(INTERVAL),
        }
    }
}
