//! What refers to what: route tables that listeners name, clusters that routes lead to.

use std::sync::Arc;

use crate::config::{
    Listener, RouteTable,
    http::Routes,
    listener::Terminal,
    route::{Action, Targets},
};

/// The route tables a listener takes from discovery.
pub(crate) fn tables(listener: &Listener) -> impl Iterator<Item = &Arc<str>> {
    terminals(listener).filter_map(|terminal| match terminal {
        Terminal::Http(manager) => match &manager.routes {
            Routes::Named(name) => Some(name),
            Routes::Inline(_) => None,
        },
        Terminal::Tcp(_) => None,
    })
}

/// The clusters a listener leads to by itself.
pub(crate) fn of_listener(listener: &Listener) -> impl Iterator<Item = &Arc<str>> {
    terminals(listener).flat_map(|terminal| -> Box<dyn Iterator<Item = &Arc<str>>> {
        match terminal {
            Terminal::Tcp(proxy) => Box::new(of_targets(&proxy.targets)),
            Terminal::Http(manager) => match &manager.routes {
                Routes::Inline(table) => Box::new(of_table(table)),
                Routes::Named(_) => Box::new(std::iter::empty()),
            },
        }
    })
}

/// The clusters a route table leads to.
pub(crate) fn of_table(table: &RouteTable) -> impl Iterator<Item = &Arc<str>> {
    let routes = table.hosts.iter().flat_map(|host| &host.routes);
    routes.flat_map(|route| -> Box<dyn Iterator<Item = &Arc<str>>> {
        match &route.action {
            Action::Forward(forward) => Box::new(
                of_targets(&forward.targets).chain(forward.mirrors.iter().map(|mirror| &mirror.cluster)),
            ),
            Action::Redirect(_) | Action::Direct(_) => Box::new(std::iter::empty()),
        }
    })
}

fn of_targets(targets: &Targets) -> Box<dyn Iterator<Item = &Arc<str>> + '_> {
    match targets {
        Targets::Single(name) => Box::new(std::iter::once(name)),
        Targets::Weighted { targets, .. } => Box::new(targets.iter().map(|target| &target.cluster)),
        // Known only when a request comes.
        Targets::Header(_) => Box::new(std::iter::empty()),
    }
}

fn terminals(listener: &Listener) -> impl Iterator<Item = &Terminal> {
    listener.chains.iter().chain(&listener.default_chain).map(|chain| &chain.terminal)
}
