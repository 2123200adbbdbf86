//! The model's compile functions, and the isolation of their panics.

use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use skysail_model::{ClientScope, Diagnostic, Outline, Part, ProxyView, World, compile_own, compile_part};
use skysail_xds::{Resource, Resources};

type CompilePart = dyn Fn(&World, &ClientScope, &Part) -> Vec<Arc<Resource>> + Send + Sync;
type CompileOwn = dyn Fn(&World, &ProxyView, &Outline) -> (Resources, Vec<Diagnostic>) + Send + Sync;

/// Compile functions; tests replace them.
pub(crate) struct Compiler {
    /// Compiles a part of a scope.
    pub(super) part: Box<CompilePart>,
    /// Compiles a view's own resources.
    pub(super) own: Box<CompileOwn>,
}

impl Default for Compiler {
    fn default() -> Self {
        Self { part: Box::new(compile_part), own: Box::new(compile_own) }
    }
}

/// A compilation that panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompilePanic {
    /// Description of the compilation that panicked.
    pub(super) subject: String,
    /// Message of the panic.
    pub(super) message: String,
}

impl fmt::Display for CompilePanic {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}: {}", self.subject, self.message)
    }
}

/// A panic for the log.
pub(super) struct PanicReport {
    /// Scope or workload, what was being compiled, and the message of the panic.
    pub(super) text: String,
    /// The previous compilation did not panic in the same way.
    pub(super) is_new: bool,
}

/// Runs `work` and returns its panic as an error. `work` only reads shared state, so a panic leaves nothing
/// inconsistent.
pub(super) fn catch_panic<T>(
    subject: impl FnOnce() -> String,
    work: impl FnOnce() -> T,
) -> Result<T, CompilePanic> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|panic| CompilePanic { subject: subject(), message: message(&*panic) })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a message").to_owned()
}
