//! The model's compile functions, and what keeps a panic in one of them from reaching anything else.

use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use skysail_model::{ClientScope, Diagnostic, Outline, Part, ProxyView, World, compile_own, compile_part};
use skysail_xds::{Resource, Resources};

type OfPart = dyn Fn(&World, &ClientScope, &Part) -> Vec<Arc<Resource>> + Send + Sync;
type OfView = dyn Fn(&World, &ProxyView, &Outline) -> (Resources, Vec<Diagnostic>) + Send + Sync;

/// What resources are compiled by.
pub(crate) struct Compiler {
    /// Compiles a part of a scope.
    pub(super) part: Box<OfPart>,
    /// Compiles what depends on the workload.
    pub(super) own: Box<OfView>,
}

impl Default for Compiler {
    fn default() -> Self {
        Self { part: Box::new(compile_part), own: Box::new(compile_own) }
    }
}

/// A compile that panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Panicked {
    /// What was being compiled.
    pub(super) what: String,
    /// The panic's message.
    pub(super) message: String,
}

impl fmt::Display for Panicked {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}: {}", self.what, self.message)
    }
}

/// A panic, as logs tell it.
pub(super) struct Failure {
    /// Whose configuration, what was being compiled, and the panic's message.
    pub(super) text: String,
    /// The compile before did not end so.
    pub(super) is_new: bool,
}

/// Runs work that reads shared state and changes none, so that a panic leaves nothing half done.
pub(super) fn contain<T>(what: impl FnOnce() -> String, work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| Panicked { what: what(), message: message(&*panic) })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
