//! Configuration objects: parsing, validation, index, and compilation to xDS.
//!
//! [`parse`](fn@parse) turns text into typed [`api`] objects, or into [`diagnostic`]s that describe the errors.
//! [`files`] merges many texts into one configuration and keeps the last good state. The [`world`] indexes the objects,
//! and [`compile`](fn@compile) makes the resources of a proxy from it. The crate is pure: no IO, no async.

pub mod analysis;
pub mod api;
mod clause;
mod compile;
mod coverage;
pub mod definitions;
pub mod diagnostic;
pub mod fields;
pub mod files;
mod go_duration;
pub mod origin;
mod parse;
mod reflect;
mod spelling;
mod validate;
pub mod view;
mod wire;
pub mod world;

pub use analysis::Code;
pub use api::{Kind, Object, ObjectKey};
pub use compile::{
    ExcludedMatch, Outline, Part, RuleKind, ServerSource, TokenRule, compile, compile_for, compile_host,
    compile_local_routes, compile_on_nodes, compile_own, compile_part, compile_secrets,
    compile_service_routes, excluded_matches, gateway_l4_source, gateway_route_fields, gateway_servers,
    is_equal_for_siblings, outline, parts, route_sources, services_by_node, sidecar_l4_field, token_rules,
};
pub use diagnostic::{Diagnostic, Severity};
pub use files::{Change, Files};
pub use origin::Origin;
pub use parse::{Fallback, Manifest, Manifests, Parsed, Refused, manifests, parse, parse_with_lines};
pub use validate::{MAX_KEY_SET, key_set};
pub use view::{ClientScope, MAX_ID, ProxyNode, ProxyView, Role};
pub use world::{
    AccountMismatch, AffectedWorkloads, ChangeSet, Effect, Effects, Endpoint, Grouping, KeyFetch, KeySource,
    NamespaceFacts, NamespaceOverrides, Reach, ReachIndex, ReachedResources, Resolved, Validator, World,
};
