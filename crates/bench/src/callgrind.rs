//! Reads the output files of `valgrind --tool=callgrind`.
//!
//! The allocator of the C library is counted separately. The work of an allocation depends on the layout of earlier
//! blocks, which differs by some percent between runs; the number of allocations does not.

use std::{collections::HashMap, ops::Sub};

/// Work of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ThreadWork {
    /// Instructions outside of the allocator.
    pub(crate) instructions: u64,
    /// Instructions of the allocator.
    pub(crate) allocator: u64,
    /// Number of allocations.
    pub(crate) allocations: u64,
}

impl Sub for ThreadWork {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            instructions: self.instructions.saturating_sub(other.instructions),
            allocator: self.allocator.saturating_sub(other.allocator),
            allocations: self.allocations.saturating_sub(other.allocations),
        }
    }
}

/// Reads the file of one thread and returns the thread's number and its work; `None` if it is not such a file.
///
/// The format is that of valgrind's manual, "Callgrind Format Specification". A name is defined once with a number
/// and then referred to by it. A line `calls=` gives the callee and the number of calls; the next line gives their
/// cost.
pub(crate) fn read(text: &str) -> Option<(u32, ThreadWork)> {
    let (mut thread, mut total) = (None, None);
    let (mut functions, mut objects) = (HashMap::new(), HashMap::new());
    let (mut caller, mut callee, mut called) = ("", "", None);
    let mut work = ThreadWork::default();
    for line in text.lines() {
        if let Some(times) = called.take() {
            let cost: u64 = line.split(' ').next_back()?.parse().ok()?;
            // The cost of a call to the allocator includes the calls that the C library makes for it.
            if let Some(asks) = allocates(callee).filter(|_| !is_c_library(caller)) {
                work.allocator += cost;
                work.allocations += if asks { times } else { 0 };
            }
        } else if let Some((key, value)) = line.split_once('=') {
            match key {
                "ob" => caller = name(&mut objects, value)?,
                "cob" => _ = name(&mut objects, value)?,
                "fn" => _ = name(&mut functions, value)?,
                "cfn" => callee = name(&mut functions, value)?,
                "calls" => called = Some(value.split(' ').next()?.parse().ok()?),
                _ => {}
            }
        } else if let Some(value) = line.strip_prefix("thread: ") {
            thread = Some(value.trim().parse().ok()?);
        } else if let Some(value) = line.strip_prefix("totals: ") {
            total = Some(value.trim().parse().ok()?);
        }
    }
    work.instructions = u64::checked_sub(total?, work.allocator)?;
    Some((thread?, work))
}

/// Resolves a name by its number, `(7)`, or defines it, `(7) name`.
fn name<'a>(names: &mut HashMap<&'a str, &'a str>, text: &'a str) -> Option<&'a str> {
    match text.split_once(") ") {
        Some((number, name)) => {
            names.insert(number, name);
            Some(name)
        }
        None => names.get(text.strip_suffix(')')?).copied(),
    }
}

/// Returns `None` for a function outside of the allocator, otherwise whether it allocates memory.
fn allocates(function: &str) -> Option<bool> {
    match function.split('@').next()? {
        "malloc" | "calloc" | "realloc" | "posix_memalign" | "aligned_alloc" => Some(true),
        "free" => Some(false),
        _ => None,
    }
}

fn is_c_library(object: &str) -> bool {
    object.rsplit('/').next().is_some_and(|file| file.starts_with("libc.") || file.starts_with("libc-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
# callgrind format
version: 1
creator: callgrind-3.19.0
cmd:  proxy --x=y
part: 1
thread: 3

positions: line
events: Ir

ob=(1) /bin/proxy
fl=(1) a.rs
fn=(1) serve
5 100
cob=(2) /usr/lib/x86_64-linux-gnu/libc.so.6
cfn=(2) malloc
calls=4 0
5 40
+1 7
cfn=(3) free
calls=4 0
* 24

ob=(2)
fn=(2)
0 30
cfn=(4) _int_malloc
calls=1 0
0 10
cfn=(3)
calls=9 0
0 1000

totals: 171
";

    #[test]
    fn the_allocator_is_counted_separately() {
        let work = ThreadWork { instructions: 107, allocator: 64, allocations: 4 };
        assert_eq!(read(FILE), Some((3, work)));
        assert_eq!(
            work - ThreadWork { instructions: 7, allocator: 65, allocations: 1 },
            ThreadWork { instructions: 100, allocator: 0, allocations: 3 }
        );
    }

    #[test]
    fn other_files_are_ignored() {
        for text in [
            "",
            "thread: 3\n",
            "totals: 5\n",
            "thread: 1\ntotals: x\n",
            &FILE.replace("cfn=(3)\n", "cfn=(9)\n"),
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
