//! Random configuration of clients: Sidecars, ServiceEntries, delegates, and routes of Gateway API for
//! services.

use std::fmt::Write as _;

use super::random::{CONNECTION_SERVICES, METHODS, PATHS, Random, SERVICES, VALUES, VERSIONS};

/// Number of services with routes of Gateway API.
pub(crate) const ROUTED_SERVICES: usize = 4;
/// Number of hosts of ServiceEntries.
pub(crate) const ENTRIES: usize = 5;
/// Number of VirtualServices that are delegates.
const DELEGATES: usize = 4;

impl Random {
    /// Returns delegates, and ReferenceGrants for routes of the namespace `web`.
    pub(crate) fn delegates(&mut self) -> String {
        let mut text = String::new();
        for number in 0..DELEGATES {
            let host = format!("s{}.shop.svc.cluster.local", self.0.usize(..SERVICES));
            let rules: String = (0..self.0.usize(1..=3)).map(|_| self.rule(&host)).collect();
            let namespace = if number == 0 { "web" } else { "shop" };
            let export = if self.chance(20) { "exportTo: ['.']" } else { "exportTo: ['*']" };
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
                 metadata: {{name: d{number}, namespace: {namespace}}}\nspec:\n  {export}\n  http:\n{rules}"
            );
        }
        text
    }

    /// Returns a rule that another VirtualService completes. The reference may be wrong.
    pub(crate) fn delegating_rule(&mut self) -> String {
        let target = match self.0.usize(..=DELEGATES) {
            0 => "{name: d0, namespace: web}".to_owned(),
            number => format!("{{name: d{number}}}"),
        };
        let matched = match self.0.u32(..4) {
            0 | 1 => String::new(),
            2 => format!("match: [{{headers: {{x-user: {{exact: {}}}}}}}], ", self.one(&VALUES)),
            _ => format!("match: [{{uri: {{prefix: {}}}}}], ", self.one(&PATHS)),
        };
        format!("  - {{{matched}delegate: {target}}}\n")
    }

    /// Returns Sidecars of the clients. Each sees the services by which a test waits for endpoints.
    pub(crate) fn sidecars(&mut self) -> String {
        let mut text = String::new();
        for (name, namespace, selector) in [
            ("front", "shop", "workloadSelector: {labels: {app: front}}"),
            ("far", "web", "workloadSelector: {labels: {app: far}}"),
            ("all", "web", ""),
        ] {
            if self.chance(50) {
                continue;
            }
            let hosts = match self.0.u32(..4) {
                0 => "'*/*'".to_owned(),
                1 => "'shop/*'".to_owned(),
                _ => self.visible(),
            };
            let mode = match self.0.u32(..3) {
                0 => "",
                1 => "  outboundTrafficPolicy: {mode: ALLOW_ANY}\n",
                _ => "  outboundTrafficPolicy: {mode: REGISTRY_ONLY}\n",
            };
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\n\
                 metadata: {{name: {name}, namespace: {namespace}}}\n\
                 spec:\n  {selector}\n{mode}  egress: [{{hosts: [{hosts}]}}]\n"
            );
        }
        text
    }

    /// Returns some hosts for a Sidecar.
    fn visible(&mut self) -> String {
        let mut hosts: Vec<String> =
            VERSIONS.iter().map(|version| format!("shop/probe-{version}.shop.svc.cluster.local")).collect();
        let mut add = |prefix: &str, count: usize, domain: &str| {
            for number in (0..count).filter(|_| self.0.bool()) {
                hosts.push(format!("shop/{prefix}{number}.{domain}"));
            }
        };
        add("s", SERVICES, "shop.svc.cluster.local");
        add("g", ROUTED_SERVICES, "shop.svc.cluster.local");
        add("t", CONNECTION_SERVICES, "shop.svc.cluster.local");
        add("e", ENTRIES, "ext");
        if self.chance(50) {
            hosts.push("web/*".to_owned());
        }
        hosts.iter().map(|host| format!("'{host}'")).collect::<Vec<_>>().join(", ")
    }

    /// Returns ServiceEntries whose endpoints are pods of the mesh, with rules for some of their hosts.
    pub(crate) fn service_entries(&mut self, addresses: &[String]) -> String {
        let mut text = String::new();
        for number in 0..ENTRIES {
            let host = format!("e{number}.ext");
            // Two entries of different namespaces may have the same host.
            for namespace in ["shop", "web"] {
                if self.chance(if namespace == "shop" { 85 } else { 25 }) {
                    text += &self.service_entry(&host, namespace, addresses);
                }
            }
            if self.chance(50) {
                let rules: String = (0..self.0.usize(1..=3)).map(|_| self.rule(&host)).collect();
                let _ = write!(
                    text,
                    "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
                     metadata: {{name: e{number}, namespace: shop}}\n\
                     spec:\n  hosts: [{host}]\n  http:\n{rules}"
                );
            }
            if self.chance(60) {
                let subsets = self.subsets();
                let policy = self.traffic_policy();
                let _ = write!(
                    text,
                    "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
                     metadata: {{name: e{number}, namespace: shop}}\n\
                     spec: {{host: {host}{policy}, subsets: [{subsets}]}}\n"
                );
            }
        }
        text
    }

    fn service_entry(&mut self, host: &str, namespace: &str, addresses: &[String]) -> String {
        let location = self.one(&["MESH_INTERNAL", "MESH_EXTERNAL"]);
        let export = match self.0.u32(..5) {
            0 => "exportTo: ['.'], ",
            1 => "exportTo: [web], ",
            _ => "",
        };
        let address = match self.0.u32(..3) {
            0 => format!("addresses: [240.0.{}.{}], ", self.0.u8(..), self.0.u8(1..)),
            _ => String::new(),
        };
        let endpoints = if namespace == "shop" && self.chance(25) {
            format!("workloadSelector: {{labels: {{app: back, version: {}}}}}", self.one(&VERSIONS))
        } else {
            let count = self.0.usize(..=addresses.len());
            let endpoints: Vec<String> = (0..count).map(|at| self.endpoint(at, addresses)).collect();
            format!("endpoints: [{}]", endpoints.join(", "))
        };
        let name = host.split('.').next().unwrap_or_default();
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
             metadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{hosts: [{host}], {export}{address}location: {location}, resolution: STATIC, ports: [\
             {{number: 80, name: http, protocol: HTTP, targetPort: 8080}}, \
             {{number: 9000, name: tcp, protocol: TCP}}], {endpoints}}}\n"
        )
    }

    fn endpoint(&mut self, at: usize, addresses: &[String]) -> String {
        let mode = if self.chance(30) { ", security.istio.io/tlsMode: istio" } else { "" };
        let weight = if self.chance(30) { format!(", weight: {}", self.0.u32(1..5)) } else { String::new() };
        format!(
            "{{address: {}, labels: {{version: {}{mode}}}{weight}}}",
            addresses[at],
            self.one(&[VERSIONS[at], VERSIONS[at], "v1"])
        )
    }

    /// Returns subsets by version. A subset may have a policy of its own.
    pub(crate) fn subsets(&mut self) -> String {
        let versions = VERSIONS.iter().take(self.0.usize(2..=3));
        let subsets: Vec<String> = versions
            .map(|version| {
                let policy = if self.chance(15) { self.traffic_policy() } else { String::new() };
                format!("{{name: {version}, labels: {{version: {version}}}{policy}}}")
            })
            .collect();
        subsets.join(", ")
    }

    /// Returns the field `trafficPolicy`, with the comma before it; empty for none.
    pub(crate) fn traffic_policy(&mut self) -> String {
        let mut fields = Vec::new();
        match self.0.u32(..10) {
            0 | 1 => fields.push("tls: {mode: ISTIO_MUTUAL}".to_owned()),
            2 => fields.push("tls: {mode: DISABLE}".to_owned()),
            3 => fields.push("portLevelSettings: [{port: {number: 80}, tls: {mode: DISABLE}}]".to_owned()),
            _ => {}
        }
        match self.0.u32(..8) {
            0 => fields.push("loadBalancer: {consistentHash: {httpHeaderName: x-user}}".to_owned()),
            1 => fields.push("loadBalancer: {simple: RANDOM}".to_owned()),
            2 => fields.push("loadBalancer: {simple: ROUND_ROBIN}".to_owned()),
            _ => {}
        }
        if self.chance(15) {
            fields.push("connectionPool: {http: {h2UpgradePolicy: UPGRADE}}".to_owned());
        }
        if fields.is_empty() { String::new() } else { format!(", trafficPolicy: {{{}}}", fields.join(", ")) }
    }

    /// Returns services with routes of Gateway API: of their own namespace, and of that of a client.
    pub(crate) fn mesh_routes(&mut self) -> String {
        let mut text = String::new();
        if self.chance(60) {
            text += "---\napiVersion: gateway.networking.k8s.io/v1\nkind: ReferenceGrant\n\
                     metadata: {name: web, namespace: shop}\nspec:\n  \
                     from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: web}]\n  \
                     to: [{group: '', kind: Service}]\n";
        }
        for number in 0..ROUTED_SERVICES {
            for (namespace, chance) in [("shop", 70), ("shop", 30), ("web", 40)] {
                if self.chance(chance) {
                    let name = format!("{namespace}-{number}-{chance}");
                    let parent = format!("{{group: '', kind: Service, name: g{number}, namespace: shop");
                    let port = if self.chance(50) { ", port: 80" } else { "" };
                    text += &self.mesh_route(&name, namespace, &format!("{parent}{port}}}"));
                }
            }
        }
        text
    }

    fn mesh_route(&mut self, name: &str, namespace: &str, parent: &str) -> String {
        let is_grpc = self.chance(20);
        let rules: String = (0..self.0.usize(1..=3))
            .map(|_| if is_grpc { self.grpc_rule() } else { self.api_rule(", namespace: shop") })
            .collect();
        let kind = if is_grpc { "GRPCRoute" } else { "HTTPRoute" };
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\n\
             metadata: {{name: {name}, namespace: {namespace}}}\n\
             spec:\n  parentRefs: [{parent}]\n  rules:\n{rules}"
        )
    }

    /// Returns a rule of a GRPCRoute. The path `/a/b` is the method `b` of the service `a`.
    fn grpc_rule(&mut self) -> String {
        let matched = match self.0.u32(..3) {
            0 => "matches: [{method: {service: a, method: b}}], ".to_owned(),
            1 => "matches: [{method: {service: a}}], ".to_owned(),
            _ => format!("matches: [{{headers: [{{name: x-user, value: {}}}]}}], ", self.one(&VALUES)),
        };
        let number = self.0.usize(..SERVICES);
        format!("  - {{{matched}backendRefs: [{{name: s{number}, namespace: shop, port: 80}}]}}\n")
    }

    /// Returns the fields of a rule that change neither its destination nor its response.
    pub(crate) fn quiet_fields(&mut self, fields: &mut Vec<String>) {
        if self.chance(15) {
            let on = self.one(&["5xx", "connect-failure,refused-stream", "gateway-error", "retriable-4xx"]);
            fields.push(match self.0.u32(0..=3) {
                0 => "retries: {attempts: 0}".to_owned(),
                attempts => format!("retries: {{attempts: {attempts}, retryOn: '{on}', perTryTimeout: 9s}}"),
            });
        }
        if self.chance(10) {
            let host = format!("s{}.shop.svc.cluster.local", self.0.usize(..SERVICES));
            fields.push(format!("mirror: {{host: {host}}}, mirrorPercentage: {{value: 50}}"));
        }
        if self.chance(10) {
            fields.push("timeout: 20s".to_owned());
        }
        if self.chance(8) {
            let method = self.one(&METHODS);
            fields.push(format!(
                "corsPolicy: {{allowOrigins: [{{exact: 'http://a.example'}}], allowMethods: [{method}]}}"
            ));
        }
    }

    /// Returns objects that concern single clients or servers: rules of the namespace `web` for services of
    /// another one, services without an address of their own, an alias, and Sidecars of servers.
    pub(crate) fn others(&mut self) -> String {
        let mut text = String::from(
            "---\napiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: shop}\n\
             spec: {type: ExternalName, externalName: s1.shop.svc.cluster.local}\n",
        );
        for (name, version) in [("h0", "v1"), ("h1", "v2")] {
            let _ = write!(
                text,
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
                 spec: {{clusterIP: None, selector: {{app: back, version: {version}}}, ports: [\
                 {{name: http, port: 8080}}, {{name: tcp, port: 9000}}]}}\n"
            );
        }
        for number in 0..SERVICES {
            if self.chance(10) {
                let (policy, subsets) = (self.traffic_policy(), self.subsets());
                let _ = write!(
                    text,
                    "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
                     metadata: {{name: s{number}, namespace: web}}\n\
                     spec: {{host: s{number}.shop.svc.cluster.local{policy}, subsets: [{subsets}]}}\n"
                );
            }
            if self.chance(10) {
                let host = format!("s{number}.shop.svc.cluster.local");
                let rules: String = (0..self.0.usize(1..=2)).map(|_| self.rule(&host)).collect();
                let export = self.one(&["'.'", "'*'", "shop"]);
                let _ = write!(
                    text,
                    "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
                     metadata: {{name: s{number}, namespace: web}}\n\
                     spec:\n  hosts: [{host}]\n  exportTo: [{export}]\n  http:\n{rules}"
                );
            }
        }
        if self.chance(30) {
            let version = self.one(&VERSIONS);
            // Without a listener for port 9000, the proxy would inspect its connections for requests.
            let tcp = "{port: {number: 9000, protocol: TCP, name: tcp}, defaultEndpoint: '0.0.0.0:9000'}";
            let ports = match self.0.u32(..3) {
                0 => "{port: {number: 8080, protocol: HTTP, name: http}, defaultEndpoint: '127.0.0.1:8080'}",
                1 => "{port: {number: 8080, protocol: HTTP, name: http}, defaultEndpoint: '0.0.0.0:8080'}",
                _ => "{port: {number: 8090, protocol: HTTP, name: http}, defaultEndpoint: '127.0.0.1:8080'}",
            };
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\n\
                 metadata: {{name: {version}, namespace: shop}}\n\
                 spec:\n  workloadSelector: {{labels: {{version: {version}}}}}\n  ingress: [{ports}, {tcp}]\n"
            );
        }
        text
    }
}
