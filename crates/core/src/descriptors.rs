//! The limit of open files: raised at the start, and a part of it kept for other things than connections that come in.
//!
//! The kernel gives the lowest free number, so a descriptor close below the limit says that nearly all are in use. A server
//! closes a connection with such a descriptor at once: accepting never fails for want of one, and files (certificates, tokens,
//! configuration) can be opened whatever comes in.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::OnceLock,
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{info, warn};

/// Descriptors that incoming connections do not get; at most a quarter of the limit.
const RESERVE: u64 = 256;
/// With fewer files than this, a warning is logged.
const ENOUGH: u64 = 8_192;

/// The limit in force.
static LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the process's limit of open files as far as it may be raised; the result is the limit in force.
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
        if limit < ENOUGH {
            warn!(
                limit,
                "the hard limit of open files is low, and each connection needs one: raise it with ulimit -Hn, LimitNOFILE= or \
                 the container runtime's nofile"
            );
        } else {
            info!(limit, "open files");
        }
        limit
    })
}

/// Whether an incoming connection's descriptor is one of those kept for other things, so that it is to be closed.
pub fn is_reserved(descriptor: &impl AsRawFd) -> bool {
    LIMIT.get().is_some_and(|limit| in_reserve(descriptor.as_raw_fd(), *limit))
}

/// How many connections the limit leaves room for.
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
    fn the_last_descriptors_are_not_for_connections() {
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
