//! Lua scripts: their states, their limits, and the API that they use. `request::script` runs them.
//!
//! A worker has one Lua state per script. Each run of a script is a coroutine of that state. A function of the API that
//! has to wait suspends the coroutine and returns a [`ScriptRequest`], which the request fulfils.
//!
//! The interpreter is Luau: it has the semantics of Lua 5.1, no access to files or processes, and checks a time limit
//! within loops, calls and pattern matching.

mod engine;
mod headers;
mod info;
mod stream;
mod values;

pub(crate) use engine::{Call, Execution, Hook, Input, RunState, ScriptRequest, States, check};
pub(crate) use headers::set_pseudo;
pub(crate) use info::Info;
pub(crate) use stream::{MessageKind, SharedStream, Stream};

/// Maximum memory of a Lua state in bytes.
const MAX_MEMORY: usize = 16 << 20;
/// Maximum number of steps in one run of a script: iterations, calls, and positions of a pattern match.
const MAX_STEPS: u64 = 4_000_000;
/// Maximum size in bytes of a body that a script sees.
pub(crate) const MAX_BODY: usize = 1 << 20;
/// Maximum size of a head after a change by a script, and of the dynamic metadata that one run sets, in bytes.
const MAX_ADDED: usize = 64 << 10;
/// Maximum number of HTTP calls in one run of a script.
const MAX_CALLS: u32 = 100;
/// Size in bytes of the pieces that `bodyChunks()` returns.
const CHUNK: usize = 16 << 10;

#[cfg(test)]
mod tests;
