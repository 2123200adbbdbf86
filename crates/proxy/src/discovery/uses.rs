//! References between resources: route tables that listeners name, clusters that routes and filters use.

use std::sync::Arc;

use skysail_policy::config::{
    FilterChain, HttpManager, Listener, RouteTable,
    http::{AccessLog, FilterKind, LogTarget, Routes},
    jwt::Keys,
    listener::Terminal,
    lua::{Lua, LuaChoice, LuaScript},
    route::{Action, Setting, Targets, VirtualHost},
};

/// Cluster names. A cluster that a request header selects is unknown in advance; `*` represents it.
pub(crate) type ClusterNames<'a> = Box<dyn Iterator<Item = &'a str> + 'a>;

/// Returns the route tables that a listener takes from discovery.
pub(crate) fn tables(listener: &Listener) -> impl Iterator<Item = &Arc<str>> {
    chains(listener).filter_map(|chain| match &chain.terminal {
        Terminal::Http(manager) => match &manager.routes {
            Routes::Named(name) => Some(name),
            Routes::Inline(_) => None,
        },
        Terminal::Tcp(_) => None,
    })
}

/// Returns the clusters that a listener leads to or that its filters call.
pub(crate) fn of_listener(listener: &Listener) -> impl Iterator<Item = &str> {
    let of_chains = chains(listener).flat_map(|chain| -> ClusterNames<'_> {
        let authorizers = chain.external_authorization.as_ref().map(|ask| &*ask.cluster).into_iter();
        match &chain.terminal {
            Terminal::Tcp(proxy) => {
                Box::new(authorizers.chain(of_targets(&proxy.targets)).chain(of_logs(&proxy.access_logs)))
            }
            Terminal::Http(manager) => Box::new(authorizers.chain(of_manager(manager))),
        }
    });
    of_chains.chain(of_logs(&listener.access_logs))
}

fn of_manager(manager: &HttpManager) -> ClusterNames<'_> {
    let tables = match &manager.routes {
        Routes::Inline(table) => of_table(table),
        Routes::Named(_) => Box::new(std::iter::empty()),
    };
    let filters = manager.filters.iter().flat_map(|filter| -> ClusterNames<'_> {
        match &filter.kind {
            FilterKind::ExternalAuthorization(ask) => Box::new(std::iter::once(&*ask.cluster)),
            FilterKind::ExternalProcessing(config) => Box::new(std::iter::once(&*config.service.cluster)),
            FilterKind::GlobalRateLimit(limit) => Box::new(std::iter::once(&*limit.cluster)),
            FilterKind::Jwt(jwt) => {
                Box::new(jwt.providers.iter().filter_map(|provider| match &provider.keys {
                    Keys::Remote(keys) => Some(&*keys.cluster),
                    Keys::Local(_) => None,
                }))
            }
            // The script selects the cluster.
            FilterKind::Lua(lua) if scripts(lua).any(|script| script.may_call()) => {
                Box::new(std::iter::once("*"))
            }
            FilterKind::Lua(_)
            | FilterKind::Rbac(_)
            | FilterKind::Fault(_)
            | FilterKind::RateLimit(_)
            | FilterKind::Cors
            | FilterKind::HeaderMutation(_)
            | FilterKind::Buffer(_)
            | FilterKind::GrpcWeb
            | FilterKind::Compress(_)
            | FilterKind::Decompress(_) => Box::new(std::iter::empty()),
        }
    });
    let tracing = manager.tracing.iter().map(|tracing| &*tracing.provider.collector.cluster);
    Box::new(tables.chain(filters).chain(tracing).chain(of_logs(&manager.access_logs)))
}

fn scripts(lua: &Lua) -> impl Iterator<Item = &Arc<LuaScript>> {
    lua.default.iter().chain(lua.named.iter().map(|(_, script)| script))
}

fn of_logs(logs: &[Arc<AccessLog>]) -> impl Iterator<Item = &str> {
    logs.iter().filter_map(|log| match &log.to {
        LogTarget::File { .. } => None,
        LogTarget::Entries { collector, .. } | LogTarget::Records { collector, .. } => {
            Some(&*collector.cluster)
        }
    })
}

/// Returns the clusters that a route table leads to, and those that its settings for filters name.
pub(crate) fn of_table(table: &RouteTable) -> ClusterNames<'_> {
    Box::new(table.hosts.iter().flat_map(|host| of_host(host)))
}

/// Returns the clusters that the routes and mirrors of a table lead to.
pub(crate) fn targets_of_table(table: &RouteTable) -> ClusterNames<'_> {
    Box::new(table.hosts.iter().flat_map(|host| targets_of_host(host)))
}

/// Returns the clusters that a virtual host leads to, and those that its settings for filters name.
pub(crate) fn of_host(host: &VirtualHost) -> ClusterNames<'_> {
    let settings = || host.routes.iter().flat_map(|route| &route.filters).map(|(_, setting)| setting);
    let scripts = settings().filter(|setting| may_call(setting)).map(|_| "*");
    let processors = settings().filter_map(|setting| match setting {
        Setting::Processing(by_route) => by_route.service.as_ref().map(|service| &*service.cluster),
        _ => None,
    });
    Box::new(targets_of_host(host).chain(processors).chain(scripts))
}

fn targets_of_host(host: &VirtualHost) -> ClusterNames<'_> {
    Box::new(host.routes.iter().flat_map(|route| -> ClusterNames<'_> {
        match &route.action {
            Action::Forward(forward) => Box::new(
                of_targets(&forward.targets).chain(forward.mirrors.iter().map(|mirror| &*mirror.cluster)),
            ),
            Action::Redirect(_) | Action::Direct(_) => Box::new(std::iter::empty()),
        }
    }))
}

/// Returns whether a route's script may call a cluster, which the script selects.
fn may_call(setting: &Setting) -> bool {
    matches!(setting, Setting::Lua(route) if matches!(&route.script, LuaChoice::Own(script) if script.may_call()))
}

fn of_targets(targets: &Targets) -> ClusterNames<'_> {
    match targets {
        Targets::Single(name) => Box::new(std::iter::once(&**name)),
        Targets::Weighted { targets, .. } => Box::new(targets.iter().map(|target| &*target.cluster)),
        Targets::Header(_) => Box::new(std::iter::once("*")),
    }
}

fn chains(listener: &Listener) -> impl Iterator<Item = &FilterChain> {
    listener.chains.iter().chain(&listener.default_chain).map(|chain| &**chain)
}
