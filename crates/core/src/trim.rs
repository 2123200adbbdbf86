//! Gives memory back: pages of our own code that only the start needed, and what traffic needed from time to time.
//!
//! Reading a command line, certificates and the first configuration touches several megabytes of code that carrying
//! traffic never runs again. The kernel counts them as ours until memory gets tight; on a machine with many sidecars
//! it should not come to that.

#![allow(unsafe_code, reason = "madvise and malloc_trim have no safe form; the proofs are at the calls")]

use std::{ffi::c_void, fs, num::NonZero, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};

/// Lets go of all pages of the executable's code and constants; those still in use come back one by one from the page cache.
pub fn startup_code() {
    let (Ok(maps), Ok(program)) = (fs::read_to_string("/proc/self/maps"), fs::read_link("/proc/self/exe"))
    else {
        return;
    };
    let program = program.as_os_str().as_encoded_bytes();
    for (start, length) in maps.lines().filter_map(|line| unwritten(line, program)) {
        let start = NonNull::<c_void>::without_provenance(start);
        // SAFETY: the range is a mapping of this process that is private, backed by the program's file and not
        // writable, and holds code, or what lies before it at the beginning of the file: headers and constants. Its
        // pages were never written (relocations go into the segments behind the code), so what comes back with the
        // next access are the very same bytes.
        if let Err(error) = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!(%error, "code of the start stays in memory");
        }
    }
}

/// Gives freed memory back to the system. The C library by itself keeps what a burst of connections needed.
pub fn heap() {
    // SAFETY: `malloc_trim` looks at free memory only, under the allocator's own locks, and may be called any time.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// Start and length of a line of `/proc/self/maps` that is the program's code, or the beginning of its file.
fn unwritten(line: &str, program: &[u8]) -> Option<(NonZero<usize>, usize)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let (rights, offset) = (words.next()?, usize::from_str_radix(words.next()?, 16).ok()?);
    let never_written = rights == "r-xp" || rights == "r--p" && offset == 0;
    let ours = never_written && words.nth(2)?.as_bytes() == program;
    if ours { Some((NonZero::new(start)?, end.checked_sub(start)?)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_never_written_is_let_go() {
        let found = |rights: &str, offset: &str, path: &str| {
            let line = format!("1000-3000 {rights} {offset} fd:01 17 {path}");
            unwritten(&line, b"/bin/proxy").map(|(start, length)| (start.get(), length))
        };
        assert_eq!(found("r-xp", "00001000", "/bin/proxy"), Some((0x1000, 0x2000)));
        assert_eq!(found("r--p", "00000000", "/bin/proxy"), Some((0x1000, 0x2000)));
        // Constants with relocations lie behind the code; dropping them would undo the relocations.
        for (rights, offset, path) in [
            ("r--p", "00003000", "/bin/proxy"),
            ("rw-p", "00000000", "/bin/proxy"),
            ("r-xp", "00001000", "/lib/libc.so"),
            ("r-xp", "00001000", ""),
        ] {
            assert_eq!(found(rights, offset, path), None);
        }
        // Everything goes on as before.
        startup_code();
        assert_eq!(found("r-xp", "00001000", "/bin/proxy"), Some((0x1000, 0x2000)));
    }
}
