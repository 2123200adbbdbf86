//! What people write, checked and indexed, and its compilation to xDS.
//!
//! Text goes through [`parse`] into typed [`api`] objects (or [`diagnostic`]s that say what is wrong), objects into the
//! [`world`], which answers every question the compile step has. Pure: no IO, no async.

pub mod api;
mod compile;
pub mod diagnostic;
pub mod files;
mod parse;
mod validate;
pub mod view;
pub mod world;

pub use api::{Kind, Object, ObjectKey};
pub use compile::compile;
pub use diagnostic::{Diagnostic, Severity};
pub use files::{Change, Files};
pub use parse::{Parsed, parse};
pub use view::{ProxyNode, ProxyView, Role};
pub use world::{Endpoint, Origin, World};
