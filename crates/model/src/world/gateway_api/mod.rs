//! Gateway API and Ingress: their routes and Gateways as internal VirtualServices and Gateways of Istio's form.
//!
//! The compile step then treats them like any other, and changes of them are found in the same way. They are made again
//! when the next changes are taken ([`World::settle`]), once for all objects that changed since. Their names contain
//! `~`, which no object of a user has.

mod addresses;
mod attach;
mod backend_tls;
mod conditions;
mod credentials;
mod deployment;
mod edge;
mod ingress;
mod listeners;
mod mesh;
mod rules;
mod status;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use self::attach::RouteTarget;
pub(crate) use backend_tls::{CONFIG_MAP, INVALID};
pub use conditions::{ClusterStatus, ObjectCondition};
pub(crate) use credentials::{CREDENTIAL, ROOTS};
pub use deployment::GatewayDeployment;
pub(crate) use ingress::INTERNAL as INGRESS;
pub use listeners::{CONTROLLERS, OWN_CLASS};
pub use status::{GatewayApiStatus, ListenerStatus, ParentStatus, StatusCondition};

use super::{
    World, fqdn,
    store::{Age, Entry},
};
use crate::{
    api::{
        Kind, Meta, Object, ObjectKey, Typed,
        gateway_api::{BackendRef, Filter, GROUP, Grant, ISTIO_GROUP, ParentReference},
        virtual_service as istio,
    },
    origin::Origin,
};

/// End of the part of an internal object's name that proxies are sent.
pub(super) const HIDDEN: &str = "~~";

/// Returns the name of an object as proxies are sent it. The rest of an internal object's name makes it unique.
pub(crate) fn shown_name(name: &str) -> &str {
    name.split_once(HIDDEN).map_or(name, |(shown, _)| shown)
}

/// State of the internal objects.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Whether an object changed on which they depend.
    is_outdated: bool,
    /// Keys of the internal objects.
    pub(super) made: Arc<BTreeSet<ObjectKey>>,
    /// Services and ServiceEntries to which routes refer as parents, policies as targets, Gateways as addresses, or
    /// Ingresses by the name of a port.
    parents: Arc<BTreeSet<ObjectKey>>,
}

/// Rules of a route in Istio's form.
#[derive(Debug)]
enum RouteRules {
    Http(Vec<istio::IstioHttpRoute>),
    Tls(Vec<istio::L4Destination>),
    Tcp(Vec<istio::L4Destination>),
}

/// Any route.
#[derive(Debug)]
struct Route<'a> {
    kind: Kind,
    meta: &'a Meta,
    origin: &'a Origin,
    parents: &'a [ParentReference],
    hostnames: &'a [String],
    /// Rules at Gateways.
    rules: RouteRules,
    /// Rules at services, for which no ReferenceGrants are needed, as in Istio.
    mesh_rules: RouteRules,
    /// All backends, also those of mirrors.
    backends: Vec<&'a BackendRef>,
}

/// Internal objects under construction.
#[derive(Default)]
struct DerivedObjects {
    objects: BTreeMap<ObjectKey, (Object, Origin)>,
}

/// Object that refers to others.
pub(super) struct Referrer<'a> {
    world: &'a World,
    /// API group and kind.
    from: (&'a str, &'a str),
    /// Whether references to other namespaces need a ReferenceGrant.
    needs_grant: bool,
    namespace: &'a str,
}

/// Reason for which a reference is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No ReferenceGrant permits it.
    NotPermitted,
    /// The kind is not supported.
    Kind,
}

impl Referrer<'_> {
    /// Returns the host of a backend.
    fn backend_host(&self, backend: &BackendRef) -> Result<String, Refusal> {
        let namespace = backend.namespace.as_deref().unwrap_or(self.namespace);
        let to = backend.group_kind();
        if !self.may_refer(namespace, to, &backend.name) {
            return Err(Refusal::NotPermitted);
        }
        match to {
            ("", "Service") => Ok(skysail_core::names::service_fqdn(&backend.name, namespace, super::DOMAIN)),
            (ISTIO_GROUP, "Hostname") => Ok(fqdn(&backend.name, namespace)),
            _ => Err(Refusal::Kind),
        }
    }

    /// Returns whether the object may refer to an object of a namespace.
    fn may_refer(&self, namespace: &str, to: (&str, &str), name: &str) -> bool {
        let wanted = Grant { from: self.from, namespace: self.namespace, to, name };
        !self.needs_grant
            || namespace == self.namespace
            || to.1 == "Hostname"
            || self
                .world
                .reference_grants
                .in_namespace(namespace)
                .any(|entry| entry.object.spec.permits(&wanted))
    }
}

impl World {
    /// Brings allocated addresses and internal objects up to date. [`World::take_changes`] and [`World::reset`] do it
    /// themselves.
    pub fn settle(&mut self) {
        self.settle_addresses();
        if !std::mem::take(&mut self.gateway_api.is_outdated) {
            return;
        }
        let (made, parents) = self.make();
        let keys: BTreeSet<ObjectKey> = made.objects.keys().cloned().collect();
        let removed: Vec<ObjectKey> = self.gateway_api.made.difference(&keys).cloned().collect();
        for key in &removed {
            self.delete(key);
        }
        for (object, origin) in made.objects.into_values() {
            self.apply(object, origin);
        }
        self.gateway_api = State { is_outdated: false, made: Arc::new(keys), parents: Arc::new(parents) };
    }

    /// Notes that an object changed.
    pub(super) fn mark_gateway_api(&mut self, key: &ObjectKey) {
        let affects = match key.kind {
            Kind::HttpRoute
            | Kind::GrpcRoute
            | Kind::TlsRoute
            | Kind::TcpRoute
            | Kind::ReferenceGrant
            | Kind::GatewayClass
            | Kind::KubernetesGateway
            | Kind::ListenerSet
            | Kind::BackendTlsPolicy
            | Kind::Ingress
            | Kind::IngressClass => true,
            Kind::ConfigMap => {
                self.ingresses.iter().next().is_some() || self.backend_tls_policies.iter().next().is_some()
            }
            Kind::Namespace => self.kubernetes_gateways.iter().next().is_some(),
            Kind::Service | Kind::ServiceEntry => self.gateway_api.parents.contains(key),
            _ => false,
        };
        self.gateway_api.is_outdated |= affects;
    }

    fn make(&self) -> (DerivedObjects, BTreeSet<ObjectKey>) {
        let (mut made, mut parents) = (DerivedObjects::default(), BTreeSet::new());
        let (routes, listeners) = (self.routes(), self.gateway_listeners());
        let (mut mesh, mut edge) = (mesh::Mesh::default(), edge::Edge::default());
        for route in &routes {
            for parent in route.parents {
                parents.extend(attach::mesh_parent(route, parent));
                for target in self.attach(route, parent, &listeners).targets {
                    match target {
                        RouteTarget::Mesh { host, port, consumer } => mesh.add(route, &host, port, consumer),
                        RouteTarget::Listener { listener, hosts } => edge.add(route, listener, hosts),
                    }
                }
            }
        }
        listeners.iter().for_each(|listener| listener.add(self, &mut made));
        let gateways = self.kubernetes_gateways.iter();
        parents.extend(gateways.flat_map(|entry| entry.object.named_services()));
        edge.finish(&mut made);
        mesh.finish(&mut made);
        self.make_ingresses(&mut made, &mut parents);
        self.make_backend_tls(&mut made, &mut parents);
        (made, parents)
    }

    /// Returns all routes, oldest first.
    fn routes(&self) -> Vec<Route<'_>> {
        let http = self.http_routes.iter().map(|entry| {
            let (route, spec) = self.route(Kind::HttpRoute, entry);
            let rules =
                |referrer: &Referrer<'_>| RouteRules::Http(rules::of_http(route.meta, &spec.rules, referrer));
            let backends = spec.rules.iter().flat_map(|rule| backends(&rule.backend_refs, &rule.filters));
            self.with_rules(route, (&spec.parent_refs, &spec.hostnames), backends.collect(), rules)
        });
        let grpc = self.grpc_routes.iter().map(|entry| {
            let (route, spec) = self.route(Kind::GrpcRoute, entry);
            let rules =
                |referrer: &Referrer<'_>| RouteRules::Http(rules::of_grpc(route.meta, &spec.rules, referrer));
            let backends = spec.rules.iter().flat_map(|rule| backends(&rule.backend_refs, &rule.filters));
            self.with_rules(route, (&spec.parent_refs, &spec.hostnames), backends.collect(), rules)
        });
        let tls = self.tls_routes.iter().map(|entry| {
            let (route, spec) = self.route(Kind::TlsRoute, entry);
            let rules =
                |referrer: &Referrer<'_>| RouteRules::Tls(rules::of_connections(&spec.rules, referrer));
            let backends = spec.rules.iter().flat_map(|rule| &rule.backend_refs).collect();
            self.with_rules(route, (&spec.parent_refs, &spec.hostnames), backends, rules)
        });
        let tcp = self.tcp_routes.iter().map(|entry| {
            let (route, spec) = self.route(Kind::TcpRoute, entry);
            let rules =
                |referrer: &Referrer<'_>| RouteRules::Tcp(rules::of_connections(&spec.rules, referrer));
            let backends = spec.rules.iter().flat_map(|rule| &rule.backend_refs).collect();
            self.with_rules(route, (&spec.parent_refs, &[]), backends, rules)
        });
        let mut routes: Vec<Route<'_>> = http.chain(grpc).chain(tls).chain(tcp).collect();
        routes.sort_by(|a, b| a.age().cmp(&b.age()));
        routes
    }

    fn route<'a, T>(&self, kind: Kind, entry: &'a Entry<T>) -> (RouteHead<'a>, &'a T) {
        let head = RouteHead { kind, meta: &entry.object.meta, origin: &entry.origin };
        (head, &entry.object.spec)
    }

    fn with_rules<'a>(
        &self,
        head: RouteHead<'a>,
        (parents, hostnames): (&'a [ParentReference], &'a [String]),
        backends: Vec<&'a BackendRef>,
        rules: impl Fn(&Referrer<'_>) -> RouteRules,
    ) -> Route<'a> {
        let RouteHead { kind, meta, origin } = head;
        let (rules, mesh_rules) =
            (rules(&self.referrer(kind, meta, true)), rules(&self.referrer(kind, meta, false)));
        Route { kind, meta, origin, parents, hostnames, rules, mesh_rules, backends }
    }

    fn referrer<'a>(&'a self, kind: Kind, meta: &'a Meta, needs_grant: bool) -> Referrer<'a> {
        Referrer { world: self, from: (GROUP, kind.as_str()), namespace: &meta.namespace, needs_grant }
    }
}

/// Returns the backends of a rule, also those of its mirrors.
fn backends<'a>(list: &'a [BackendRef], filters: &'a [Filter]) -> impl Iterator<Item = &'a BackendRef> {
    let mirrors = filters.iter().filter_map(|filter| filter.request_mirror.as_ref());
    list.iter().chain(mirrors.map(|mirror| &mirror.backend_ref))
}

/// Kind, metadata and origin of a route.
#[derive(Clone, Copy)]
struct RouteHead<'a> {
    kind: Kind,
    meta: &'a Meta,
    origin: &'a Origin,
}

impl Route<'_> {
    fn age(&self) -> Age<'_> {
        Age::of_gateway_api(self.meta, self.origin)
    }
}

impl DerivedObjects {
    /// Adds an internal object, with the age of the route or Gateway from which it is made.
    fn add<T>(&mut self, namespace: &str, name: String, of: (&Meta, &Origin), spec: T)
    where
        Object: From<Typed<T>>,
    {
        let meta = Meta { namespace: namespace.to_owned(), name, created: of.0.created, ..Meta::default() };
        let object = Object::from(Typed { meta, spec });
        self.objects.insert(object.key(), (object, of.1.clone()));
    }
}
