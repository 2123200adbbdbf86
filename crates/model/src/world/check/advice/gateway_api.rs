//! Objects of Gateway API that are not accepted or whose references are not resolved, from their status.

use super::super::Report;
use crate::{
    analysis::Code,
    api::{
        Kind, ObjectKey,
        gateway_api::{Listener, ObjectReference},
    },
    origin::Origin,
    world::gateway_api::StatusCondition,
};

impl Report<'_> {
    /// Reports conditions that do not hold.
    pub(super) fn gateway_api(&mut self) {
        for status in self.world.unrecorded().gateway_api_status() {
            let Some(origin) = self.origin_of_route(&status.object) else { continue };
            let about = (&status.object, &origin);
            for listener in &status.listeners {
                for condition in listener.conditions.iter().filter(|of| !of.status) {
                    // The other conditions repeat these two.
                    let code = match (condition.kind, condition.reason) {
                        ("ResolvedRefs", "RefNotPermitted") => Code::ReferenceWithoutGrant,
                        // Reported when the Gateway was read.
                        (_, "UnsupportedProtocol" | "InvalidRouteKinds") => continue,
                        // Secrets are reported one by one below.
                        (_, "InvalidCertificateRef")
                            if self.names_secrets_only(&status.object, &listener.name) =>
                        {
                            continue;
                        }
                        ("ResolvedRefs", _) | ("Accepted", "ProtocolConflict" | "HostnameConflict") => {
                            Code::ListenerNotServed
                        }
                        _ => continue,
                    };
                    let message = format!("listener {}: {}", listener.name, words(condition));
                    self.report_key(about, code, "spec.listeners", message, remedy(code));
                }
            }
            let refused = |of: &&StatusCondition| of.kind == "Accepted" && of.reason == "NotAllowed";
            if let Some(condition) = status.conditions.iter().find(refused) {
                let code = Code::ListenerNotServed;
                let remedy = "set allowedListeners in the Gateway";
                self.report_key(about, code, "spec.parentRef", words(condition), remedy);
            }
            let unusable = |of: &&StatusCondition| {
                matches!(of.reason, "AddressNotUsable" | "AddressNotAssigned") && of.kind == "Programmed"
            };
            if let Some(condition) = status.conditions.iter().find(unusable) {
                let code = Code::UnresolvedReference;
                self.report_key(about, code, "spec.addresses", words(condition), remedy(code));
            }
            self.listener_secrets(about);
            for (index, parent) in status.parents.iter().enumerate() {
                for condition in parent.conditions.iter().filter(|of| !of.status) {
                    let (code, field) = match (condition.kind, condition.reason) {
                        // Reported when the route was read.
                        (_, "InvalidKind") => continue,
                        ("Accepted", _) => (Code::RouteNotAccepted, format!("spec.parentRefs[{index}]")),
                        (_, "RefNotPermitted") => (Code::ReferenceWithoutGrant, "spec.rules".to_owned()),
                        _ => (Code::UnresolvedReference, "spec.rules".to_owned()),
                    };
                    self.report_key(about, code, &field, words(condition), remedy(code));
                }
            }
        }
        for (route, message) in self.world.unrecorded().backends_without_port() {
            let Some(origin) = self.origin_of_route(&route) else { continue };
            let code = Code::UnknownDestinationPort;
            self.report_key((&route, &origin), code, "spec.rules", message, "use a port of the Service");
        }
    }

    /// Returns the listeners of a Gateway or a ListenerSet.
    fn listeners_of(&self, key: &ObjectKey) -> &[Listener] {
        let world = self.world.unrecorded();
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        let listeners = match key.kind {
            Kind::KubernetesGateway => {
                world.kubernetes_gateways.get(namespace, name).map(|entry| &entry.object.spec.listeners)
            }
            Kind::ListenerSet => {
                world.listener_sets.get(namespace, name).map(|entry| &entry.object.spec.listeners)
            }
            _ => None,
        };
        listeners.map_or(&[], Vec::as_slice)
    }

    fn names_secrets_only(&self, key: &ObjectKey, listener: &str) -> bool {
        let mut listeners = self.listeners_of(key).iter().filter(|of| of.name == listener);
        listeners.all(|of| of.tls.iter().flat_map(|tls| &tls.certificate_refs).all(is_secret))
    }

    /// Reports Secrets of listeners that do not exist.
    fn listener_secrets(&mut self, about: (&ObjectKey, &Origin)) {
        let world = self.world.unrecorded();
        let namespace = about.0.namespace.as_str();
        for (index, listener) in self.listeners_of(about.0).to_vec().iter().enumerate() {
            for (at, of) in listener.tls.iter().flat_map(|tls| &tls.certificate_refs).enumerate() {
                let namespace = of.namespace.as_deref().unwrap_or(namespace);
                let found = world.secret(namespace, &of.name).is_some_and(|secret| secret.pair().is_some());
                if is_secret(of) && !found {
                    let message =
                        format!("there is no Secret {namespace}/{} with certificate and key", of.name);
                    let field = format!("spec.listeners[{index}].tls.certificateRefs[{at}]");
                    let remedy = "add the Secret, with tls.crt and tls.key";
                    self.report_key(about, Code::UnknownSecret, &field, message, remedy);
                }
            }
        }
    }

    fn origin_of_route(&self, key: &ObjectKey) -> Option<Origin> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        let world = self.world.unrecorded();
        let origin = match key.kind {
            Kind::KubernetesGateway => &world.kubernetes_gateways.get(namespace, name)?.origin,
            Kind::ListenerSet => &world.listener_sets.get(namespace, name)?.origin,
            Kind::HttpRoute => &world.http_routes.get(namespace, name)?.origin,
            Kind::GrpcRoute => &world.grpc_routes.get(namespace, name)?.origin,
            Kind::TlsRoute => &world.tls_routes.get(namespace, name)?.origin,
            Kind::TcpRoute => &world.tcp_routes.get(namespace, name)?.origin,
            _ => return None,
        };
        Some(origin.clone())
    }
}

fn is_secret(of: &ObjectReference) -> bool {
    of.kind.as_deref().is_none_or(|kind| kind == "Secret")
}

fn words(condition: &StatusCondition) -> String {
    format!("{} ({})", condition.message, condition.reason)
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::ReferenceWithoutGrant => "add a ReferenceGrant in the namespace of the object",
        Code::RouteNotAccepted => "compare it with the listeners and allowedRoutes of the parent",
        Code::UnresolvedReference => "correct kind, name and namespace, or add the object",
        _ => "correct the listener, or add the Secret",
    }
}
