//! What people write, checked and indexed, and its compilation to xDS.
//!
//! Text goes through [`parse`](fn@parse) into typed [`api`] objects, or [`diagnostic`]s that say what is wrong; [`files`]
//! makes one configuration of many texts and keeps the last good state. The [`world`] holds the objects and answers
//! every question that [`compile`](fn@compile) has, which makes the resources a proxy is sent. Pure: no IO, no async.

pub mod api;
mod clause;
mod compile;
pub mod diagnostic;
pub mod files;
pub mod origin;
mod parse;
mod spelling;
mod validate;
pub mod view;
pub mod world;

pub use api::{Kind, Object, ObjectKey};
pub use compile::{
    Outline, Part, compile, compile_host, compile_own, compile_part, is_alike, outline, parts,
};
pub use diagnostic::{Diagnostic, Severity};
pub use files::{Change, Files};
pub use origin::Origin;
pub use parse::{Fallback, Manifests, Parsed, Refused, manifests, mesh_config, parse};
pub use view::{ClientScope, MAX_ID, ProxyNode, ProxyView, Role};
pub use world::{ChangeSet, Effect, Effects, Endpoint, OtherAccount, Resolved, World};
