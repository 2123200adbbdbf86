//! Gives back the pages of our own code that only the start needed.
//!
//! Reading a command line, certificates and the first configuration touches several megabytes of code that carrying
//! traffic never runs again. The kernel counts them as ours until memory gets tight; on a machine with many sidecars
//! it should not come to that.

#![allow(unsafe_code, reason = "madvise has no safe form; the proof is at the call")]

use std::{ffi::c_void, fs, num::NonZero, ptr::NonNull};

use nix::sys::mman::{MmapAdvise, madvise};

/// Lets go of all pages of the executable's code; those still in use come back one by one from the page cache.
pub(crate) fn startup_code() {
    let (Ok(maps), Ok(program)) = (fs::read_to_string("/proc/self/maps"), fs::read_link("/proc/self/exe"))
    else {
        return;
    };
    for (start, length) in maps.lines().filter_map(|line| code(line, program.as_os_str().as_encoded_bytes()))
    {
        let start = NonNull::<c_void>::without_provenance(start);
        // SAFETY: the range is a mapping of this process that is private, backed by the program's file, executable
        // and not writable. Its pages were never written (position-independent code has no relocations in it), so
        // what comes back with the next access are the very same bytes. No Rust object lies in it.
        if let Err(error) = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) } {
            tracing::debug!(%error, "code of the start stays in memory");
        }
    }
}

/// Start and length of a line of `/proc/self/maps` that is the program's code.
fn code(line: &str, program: &[u8]) -> Option<(NonZero<usize>, usize)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let is_code = words.next()? == "r-xp" && words.nth(3)?.as_bytes() == program;
    if is_code { Some((NonZero::new(start)?, end.checked_sub(start)?)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_programs_own_code_is_let_go() {
        let line = |perms: &str, path: &str| format!("1000-3000 {perms} 00001000 fd:01 17 {path}");
        let found = |perms, path| {
            code(&line(perms, path), b"/bin/proxy").map(|(start, length)| (start.get(), length))
        };
        assert_eq!(found("r-xp", "/bin/proxy"), Some((0x1000, 0x2000)));
        for (perms, path) in
            [("rw-p", "/bin/proxy"), ("r--p", "/bin/proxy"), ("r-xp", "/lib/libc.so"), ("r-xp", "")]
        {
            assert_eq!(found(perms, path), None);
        }
        // Code goes on as before.
        startup_code();
        assert_eq!(found("r-xp", "/bin/proxy"), Some((0x1000, 0x2000)));
    }
}
