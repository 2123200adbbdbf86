//! Interception of a pod's connections: the rules of a pod ([`interception`]), packet rules as values ([`rules`]), and
//! their installation ([`nftables`]) by netlink messages ([`netlink`]).
//!
//! [`run`] is the command `skysail-proxy intercept`, the init container of injected pods. `skysail up` uses the parts.

mod addresses;
mod command;
mod error;
pub mod interception;
pub mod netlink;
pub mod nftables;
pub mod rules;
mod validation;

pub use command::{InterceptArgs, run};
pub use error::Error;
