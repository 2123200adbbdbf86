//! Returns memory to the system: code pages that only the start needed, and heap that a burst of traffic needed.
//!
//! Reading a command line, certificates and the first configuration touches several megabytes of code that traffic
//! never runs again. The kernel counts these pages as the process's until memory is short, which adds up on a machine
//! with many sidecars.

#![allow(unsafe_code, reason = "madvise and malloc_trim have no safe form; the proofs are at the calls")]

use std::{ffi::c_void, fs, num::NonZero, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};

/// Releases all pages of the executable's code, and of the constants at the beginning of its file. A page that is used
/// again comes from the page cache.
pub fn startup_code() {
    let (Ok(maps), Ok(program)) = (fs::read_to_string("/proc/self/maps"), fs::read_link("/proc/self/exe"))
    else {
        return;
    };
    let program = program.as_os_str().as_encoded_bytes();
    for (start, length) in maps.lines().filter_map(|line| unwritten(line, program)) {
        let start = NonNull::<c_void>::without_provenance(start);
        // SAFETY: the range is a private mapping of this process, backed by the program's file and not writable. It
        // holds code, or the headers and constants at the beginning of the file. Its pages were never written
        // (relocations go into the segments behind the code), so the next access reads the very same bytes.
        if let Err(error) = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!(%error, "the code pages of the start cannot be released");
        }
    }
}

/// Returns freed memory to the system. By default glibc keeps what a burst of connections needed. Does nothing with
/// other C libraries.
pub fn heap() {
    // SAFETY: `malloc_trim` touches free memory only, under the allocator's own locks, and may be called at any time.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// Returns start and length of a line of `/proc/self/maps` that maps the program's code or the beginning of its file.
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
    fn only_pages_that_were_never_written_are_released() {
        let found = |rights: &str, offset: &str, path: &str| {
            let line = format!("1000-3000 {rights} {offset} fd:01 17 {path}");
            unwritten(&line, b"/bin/proxy").map(|(start, length)| (start.get(), length))
        };
        assert_eq!(found("r-xp", "00001000", "/bin/proxy"), Some((0x1000, 0x2000)));
        assert_eq!(found("r--p", "00000000", "/bin/proxy"), Some((0x1000, 0x2000)));
        // Constants with relocations lie behind the code. Dropping their pages would undo the relocations.
        for (rights, offset, path) in [
            ("r--p", "00003000", "/bin/proxy"),
            ("rw-p", "00000000", "/bin/proxy"),
            ("r-xp", "00001000", "/lib/libc.so"),
            ("r-xp", "00001000", ""),
        ] {
            assert_eq!(found(rights, offset, path), None);
        }
        // The process continues unharmed.
        startup_code();
        assert_eq!(found("r-xp", "00001000", "/bin/proxy"), Some((0x1000, 0x2000)));
    }
}
