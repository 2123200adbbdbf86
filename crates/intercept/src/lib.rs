//! Interception of a pod's connections: packet rules as values ([`rules`]), and their installation ([`nftables`]) by
//! netlink messages ([`netlink`]).

pub mod netlink;
pub mod nftables;
pub mod rules;
