//! Listeners of Gateways and ListenerSets, as internal Gateways of Istio's form: one for each listener.

use super::{
    DerivedObjects,
    credentials::{Credentials, RefusedReference},
    deployment::proxy_labels,
};
use crate::{
    api::{
        self, Kind, Labels, Meta,
        gateway::{MESH_CREDENTIAL, Server, ServerPort, ServerTls, ServerTlsMode},
        gateway_api::{
            FrontendValidationMode, GROUP, INTERNAL, KubernetesGateway, Listener, ListenerProtocol,
            NamespacesFrom, ParentReference, RouteNamespaces,
        },
    },
    origin::Origin,
    world::{World, gateways::is_within, store::Entry},
};

/// Controllers of the GatewayClasses that are served here.
pub const CONTROLLERS: &[&str] = &["istio.io/gateway-controller", "skysail.io/gateway-controller"];

/// Class that the control plane makes on a cluster, and its controller.
pub const OWN_CLASS: (&str, &str) = ("skysail", CONTROLLERS[1]);

/// Classes that need no GatewayClass object.
const CLASSES: &[&str] = &["istio", OWN_CLASS.0];

/// Option that selects the mode of terminated TLS.
const TERMINATE_MODE: &str = "gateway.istio.io/tls-terminate-mode";

/// A listener, and the objects that define it.
#[derive(Debug)]
pub(super) struct GatewayListener<'a> {
    /// Gateway or ListenerSet that has the listener.
    pub(super) kind: Kind,
    pub(super) meta: &'a Meta,
    origin: &'a Origin,
    pub(super) gateway: &'a api::Typed<KubernetesGateway>,
    pub(super) listener: &'a Listener,
    /// Credentials of TLS, or the reason for which they are refused.
    pub(super) credentials: Result<Credentials, RefusedReference>,
    /// Conflict with an earlier listener of the port, which is served.
    pub(super) conflict: Option<ListenerConflict>,
}

/// Conflict of a listener with an earlier one of its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListenerConflict {
    /// The protocols exclude each other.
    Protocol,
    /// The hosts are the same.
    Hostname,
}

impl World {
    /// Returns whether there is a GatewayClass of this name.
    pub fn has_gateway_class(&self, name: &str) -> bool {
        self.gateway_classes.get("", name).is_some()
    }

    /// Returns whether Gateways of a class are served here.
    pub(super) fn is_own_class(&self, class: &str) -> bool {
        match self.gateway_classes.get("", class) {
            Some(entry) => CONTROLLERS.contains(&entry.object.spec.controller_name.as_str()),
            None => CLASSES.contains(&class),
        }
    }

    /// Returns the name of the controller in the status of an object at a parent: that of the Gateway's class.
    pub fn controller_at(&self, parent: &ParentReference, namespace: &str) -> &'static str {
        let namespace = parent.namespace.as_deref().unwrap_or(namespace);
        let mut gateway = self.kubernetes_gateways.get(namespace, &parent.name);
        if parent.kind.as_deref() == Some("ListenerSet") {
            let set =
                self.listener_sets.get(namespace, &parent.name).map(|entry| &entry.object.spec.parent_ref);
            gateway = set.and_then(|of| {
                self.kubernetes_gateways.get(of.namespace.as_deref().unwrap_or(namespace), &of.name)
            });
        }
        let name = gateway.map(|entry| entry.object.spec.gateway_class_name.as_str());
        let class = name.and_then(|name| self.gateway_classes.get("", name));
        let named = class.map(|entry| entry.object.spec.controller_name.as_str());
        let known = CONTROLLERS.iter().find(|controller| named == Some(**controller));
        // The controller stays the same when the object of the class is made.
        let default = if name == Some(OWN_CLASS.0) { OWN_CLASS.1 } else { CONTROLLERS[0] };
        known.copied().unwrap_or(default)
    }

    /// Returns all listeners of the Gateways that are served here, those of the oldest Gateways first.
    pub(super) fn gateway_listeners(&self) -> Vec<GatewayListener<'_>> {
        let own =
            |entry: &&Entry<KubernetesGateway>| self.is_own_class(&entry.object.spec.gateway_class_name);
        let mut gateways: Vec<_> = self.kubernetes_gateways.iter().filter(own).collect();
        gateways.sort_by(|a, b| a.gateway_api_age().cmp(&b.gateway_api_age()));
        let mut made = Vec::new();
        for entry in gateways {
            let first = made.len();
            let gateway = &*entry.object;
            let place = (Kind::KubernetesGateway, &gateway.meta, &entry.origin);
            made.extend(gateway.spec.listeners.iter().map(|of| self.listener(place, gateway, of)));
            for set in self.listener_sets_of(gateway) {
                let place = (Kind::ListenerSet, &set.object.meta, &set.origin);
                let listeners = set.object.spec.listeners.iter();
                made.extend(listeners.map(|of| self.listener(place, gateway, of)));
            }
            mark_conflicts(&mut made[first..]);
        }
        made
    }

    /// Returns the ListenerSets of a Gateway that it allows, oldest first.
    pub(super) fn listener_sets_of(
        &self,
        gateway: &api::Typed<KubernetesGateway>,
    ) -> Vec<&Entry<api::gateway_api::ListenerSet>> {
        let attached = |entry: &&Entry<api::gateway_api::ListenerSet>| {
            is_parent(gateway, &entry.object) && self.allows_listeners(gateway, &entry.object.meta.namespace)
        };
        let mut sets: Vec<_> = self.listener_sets.iter().filter(attached).collect();
        sets.sort_by(|a, b| a.gateway_api_age().cmp(&b.gateway_api_age()));
        sets
    }

    /// Returns the ListenerSets that a Gateway which is served here does not allow.
    pub(super) fn refused_listener_sets(
        &self,
    ) -> impl Iterator<Item = &Entry<api::gateway_api::ListenerSet>> {
        self.listener_sets.iter().filter(move |set| {
            let (own, parent) = (&set.object.meta.namespace, &set.object.spec.parent_ref);
            let gateway =
                self.kubernetes_gateways.get(parent.namespace.as_ref().unwrap_or(own), &parent.name);
            gateway.map(|entry| &entry.object).is_some_and(|gateway| {
                self.is_own_class(&gateway.spec.gateway_class_name)
                    && is_parent(gateway, &set.object)
                    && !self.allows_listeners(gateway, own)
            })
        })
    }

    /// Returns whether a Gateway allows ListenerSets in a namespace. By default it allows none.
    fn allows_listeners(&self, gateway: &api::Typed<KubernetesGateway>, namespace: &str) -> bool {
        let allowed = gateway.spec.allowed_listeners.as_ref().and_then(|allowed| allowed.namespaces.as_ref());
        let none = RouteNamespaces { from: Some(NamespacesFrom::None), selector: None };
        self.is_allowed(Some(allowed.unwrap_or(&none)), &gateway.meta.namespace, namespace)
    }

    /// Returns whether a selection of namespaces of an object in `own` has a namespace.
    pub(super) fn is_allowed(&self, of: Option<&RouteNamespaces>, own: &str, namespace: &str) -> bool {
        match of.and_then(|of| of.from).unwrap_or_default() {
            NamespacesFrom::All => true,
            NamespacesFrom::Same => own == namespace,
            NamespacesFrom::None => false,
            NamespacesFrom::Selector => {
                let selector = of.and_then(|of| of.selector.as_ref());
                selector.is_some_and(|selector| self.selects_namespace(selector, namespace))
            }
        }
    }

    fn listener<'a>(
        &'a self,
        (kind, meta, origin): (Kind, &'a Meta, &'a Origin),
        gateway: &'a api::Typed<KubernetesGateway>,
        listener: &'a Listener,
    ) -> GatewayListener<'a> {
        let credentials = self.credentials((kind, meta), gateway, listener);
        GatewayListener { kind, meta, origin, gateway, listener, credentials, conflict: None }
    }

    /// Returns the labels and the namespace of the proxies of a Gateway.
    pub(super) fn proxies_of(&self, gateway: &api::Typed<KubernetesGateway>) -> (Labels, String) {
        let own = &gateway.meta.namespace;
        // An address that is a host names the Service of proxies that were deployed by hand.
        let service = gateway.named_services().find_map(|of| self.service_named(&of.namespace, &of.name));
        if let Some(service) = service.filter(|service| !service.spec.selector.is_empty()) {
            return (service.spec.selector.clone(), service.meta.namespace.clone());
        }
        (proxy_labels(&gateway.meta.name), own.clone())
    }
}

impl<'a> GatewayListener<'a> {
    /// Returns the name of the internal Gateway.
    pub(super) fn internal(&self) -> String {
        format!("{}~{INTERNAL}~{}", self.meta.name, self.listener.name)
    }

    /// Returns the host; `*` for all.
    pub(super) fn host(&self) -> &'a str {
        self.listener.hostname.as_deref().filter(|host| !host.is_empty()).unwrap_or("*")
    }

    /// Returns the protocol.
    pub(super) fn protocol(&self) -> Option<ListenerProtocol> {
        self.listener.protocol
    }

    /// Returns whether the listener is served.
    pub(super) fn is_usable(&self) -> bool {
        self.credentials.is_ok()
            && self.conflict.is_none()
            && self.listener.is_supported()
            && !self.gateway.has_no_supported_address()
    }

    /// Returns whether another listener with HTTPS has the port, and a host that this listener may serve too.
    pub(super) fn overlaps(&self, other: &GatewayListener<'_>) -> bool {
        let is_https = |of: &GatewayListener<'_>| of.protocol() == Some(ListenerProtocol::Https);
        is_https(self)
            && is_https(other)
            && self.listener.port == other.listener.port
            && std::ptr::eq(self.gateway, other.gateway)
            && !std::ptr::eq(self, other)
            && (is_within(self.host(), other.host()) || is_within(other.host(), self.host()))
    }

    /// Returns whether the listener leaves a host of a route to another listener of the Gateway: one of the same port and
    /// protocol that is served, has the host, and is more specific. The status of a route does not show it, as in Istio.
    pub(super) fn leaves(&self, host: &str, other: &GatewayListener<'_>) -> bool {
        self.listener.port == other.listener.port
            && self.protocol() == other.protocol()
            && std::ptr::eq(self.gateway, other.gateway)
            && self.host() != other.host()
            && is_within(other.host(), self.host())
            && is_within(host, other.host())
            && other.is_usable()
    }

    /// Adds the internal Gateway.
    pub(super) fn add(&self, world: &World, made: &mut DerivedObjects) {
        let Some(protocol) = self.listener.protocol.filter(|_| self.is_usable()) else { return };
        let (selector, namespace) = world.proxies_of(self.gateway);
        let protocol = match protocol {
            ListenerProtocol::Http => "HTTP",
            ListenerProtocol::Https => "HTTPS",
            ListenerProtocol::Tls => "TLS",
            ListenerProtocol::Tcp => "TCP",
            ListenerProtocol::Udp | ListenerProtocol::Other => return,
        };
        let port = ServerPort {
            number: self.listener.port,
            protocol: protocol.into(),
            name: "default".into(),
            target_port: 0,
        };
        let server =
            Server { port: Some(port), hosts: self.hosts(world), tls: self.tls(), ..Server::default() };
        // The listener of a ListenerSet has another age.
        let is_own = self.kind == Kind::KubernetesGateway || self.gateway.spec.listeners.is_empty();
        let client_credential =
            is_own.then(|| world.client_credential(self.gateway)).and_then(Result::ok).flatten();
        let named = self.gateway.named_services().filter(|of| of.namespace == namespace);
        let services = named.map(|of| of.name).collect();
        let only_in = Some(namespace);
        let spec = api::Gateway { selector, servers: vec![server], only_in, services, client_credential };
        made.add(&self.meta.namespace, self.internal(), (self.meta, self.origin), spec);
    }

    /// Returns the hosts, with the namespaces of the routes that may use them.
    fn hosts(&self, world: &World) -> Vec<String> {
        let host = self.host();
        let allowed = self.listener.allowed_routes.as_ref().and_then(|allowed| allowed.namespaces.as_ref());
        match allowed.and_then(|allowed| allowed.from).unwrap_or_default() {
            NamespacesFrom::All => vec![format!("*/{host}")],
            NamespacesFrom::Same => vec![format!("{}/{host}", self.meta.namespace)],
            NamespacesFrom::None => vec![format!("~/{host}")],
            NamespacesFrom::Selector => {
                let names = world.namespaces.iter().map(|entry| &entry.object.meta.name);
                let names = names.filter(|name| world.is_allowed(allowed, &self.meta.namespace, name));
                let hosts: Vec<String> = names.map(|name| format!("{name}/{host}")).collect();
                if hosts.is_empty() { vec![format!("~/{host}")] } else { hosts }
            }
        }
    }

    fn tls(&self) -> Option<ServerTls> {
        let protocol = self.listener.protocol?;
        if !matches!(protocol, ListenerProtocol::Https | ListenerProtocol::Tls) {
            return None;
        }
        if !self.listener.terminates() {
            let joins_networks = self.listener.joins_networks(&self.gateway.meta.labels);
            let mode =
                if joins_networks { ServerTlsMode::AutoPassthrough } else { ServerTlsMode::Passthrough };
            return Some(ServerTls { mode, ..ServerTls::default() });
        }
        let options = self.listener.tls.as_ref().map(|tls| &tls.options);
        let option = options.and_then(|options| options.get(TERMINATE_MODE)).map(String::as_str);
        let mode = match option {
            Some("MUTUAL") => ServerTlsMode::Mutual,
            Some("OPTIONAL_MUTUAL") => ServerTlsMode::OptionalMutual,
            Some("ISTIO_MUTUAL") => ServerTlsMode::IstioMutual,
            _ => ServerTlsMode::Simple,
        };
        let Credentials { certificates: mut names, clients } = self.credentials.clone().unwrap_or_default();
        let mut made = ServerTls { mode, ..ServerTls::default() };
        if let Some((roots, of_clients)) = clients.filter(|_| mode != ServerTlsMode::IstioMutual) {
            made.ca_cert_credential_name = roots;
            // As in Istio, the option takes precedence.
            if mode == ServerTlsMode::Simple {
                let is_insecure = of_clients == FrontendValidationMode::AllowInsecureFallback;
                made.mode = if is_insecure { ServerTlsMode::OptionalMutual } else { ServerTlsMode::Mutual };
                made.insecure_skip_verify = Some(is_insecure);
            }
        }
        if option == Some("ISTIO_SIMPLE") {
            made.credential_name = MESH_CREDENTIAL.to_owned();
        } else if names.len() == 1 {
            made.credential_name = names.remove(0);
        } else {
            made.credential_names = names;
        }
        Some(made)
    }
}

/// Marks listeners whose protocol differs from that of an earlier one of the port, or whose host is the same.
fn mark_conflicts(listeners: &mut [GatewayListener<'_>]) {
    let class = |protocol: Option<ListenerProtocol>| match protocol {
        Some(ListenerProtocol::Https | ListenerProtocol::Tls) => Some(ListenerProtocol::Tls),
        other => other,
    };
    for index in 1..listeners.len() {
        let (before, rest) = listeners.split_at_mut(index);
        let Some(this) = rest.first_mut() else { continue };
        if !this.listener.is_supported() {
            continue;
        }
        let served = before.iter().filter(|of| {
            of.listener.port == this.listener.port && of.conflict.is_none() && of.listener.is_supported()
        });
        this.conflict = served.clone().find_map(|of| {
            if class(of.protocol()) != class(this.protocol()) {
                return Some(ListenerConflict::Protocol);
            }
            (of.listener.hostname == this.listener.hostname).then_some(ListenerConflict::Hostname)
        });
    }
}

/// Returns whether a Gateway is the parent of a ListenerSet.
fn is_parent(
    gateway: &api::Typed<KubernetesGateway>,
    set: &api::Typed<api::gateway_api::ListenerSet>,
) -> bool {
    let parent = &set.spec.parent_ref;
    parent.group_kind() == (GROUP, "Gateway")
        && parent.name == gateway.meta.name
        && *parent.namespace.as_ref().unwrap_or(&set.meta.namespace) == gateway.meta.namespace
}
