//! The limit of open files: raised at the start, with a reserve that incoming connections do not get.
//!
//! The kernel assigns the lowest free number, so a descriptor close to the limit shows that nearly all are in use. A
//! server closes a connection with such a descriptor at once. Accepting therefore never fails for lack of a descriptor,
//! and files (certificates, tokens, configuration) can be opened under any load.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::OnceLock,
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{info, warn};

/// Number of descriptors reserved for other uses than incoming connections; at most a quarter of the limit.
const RESERVE: u64 = 256;
/// Limit of open files below which a warning is logged.
const LOW_LIMIT: u64 = 8_192;

/// Limit in effect, set by [`raise`].
static LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the process's limit of open files as far as permitted and returns the limit in effect.
pub fn raise() -> u64 {
    *LIMIT.get_or_init(|| {
        let (soft, hard) = match getrlimit(Resource::RLIMIT_NOFILE) {
            Ok(limits) => limits,
            Err(error) => {
                warn!(%error, "the limit of open files is not known; 1024 is assumed");
                return 1_024;
            }
        };
        let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(error) => {
                warn!(%error, soft, hard, "the limit of open files cannot be raised");
                soft
            }
        };
        if limit < LOW_LIMIT {
            warn!(
                limit,
                "the hard limit of open files is low, and each connection needs a file: raise it with ulimit -Hn, LimitNOFILE= or \
                 the container runtime's nofile"
            );
        } else {
            info!(limit, "open files");
        }
        limit
    })
}

/// Returns whether an incoming connection's descriptor is in the reserve; the server then closes the connection.
pub fn is_reserved(descriptor: &impl AsRawFd) -> bool {
    LIMIT.get().is_some_and(|limit| in_reserve(descriptor.as_raw_fd(), *limit))
}

/// Returns the number of connections that the limit has room for.
pub fn for_connections() -> usize {
    usize::try_from(raise() - reserve(raise())).unwrap_or(usize::MAX)
}

fn reserve(limit: u64) -> u64 {
    RESERVE.min(limit / 4)
}

fn in_reserve(descriptor: RawFd, limit: u64) -> bool {
    u64::try_from(descriptor).is_ok_and(|descriptor| descriptor >= limit - reserve(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_in_the_reserve_are_not_for_connections() {
        for (descriptor, limit, reserved) in [
            (0, 1_024, false),
            (767, 1_024, false),
            (768, 1_024, true),
            (1_023, 1_024, true),
            (74, 100, false),
            (75, 100, true),
        ] {
            assert_eq!(in_reserve(descriptor, limit), reserved, "{descriptor} of {limit}");
        }
        assert!(!in_reserve(RawFd::MAX, u64::MAX), "without a limit");
    }
}
