//! Random rate limits, EnvoyFilters, and the authorizers of CUSTOM policies.

use std::fmt::Write as _;

use super::random::{PATHS, Random, SERVICES, VALUES, VERSIONS};

/// Providers of CUSTOM policies: an authorizer, one without a pod, and a name that no provider has.
pub(crate) const PROVIDERS: [&str; 3] = ["ask", "gone", "missing"];
/// The authorizer is an echo server: it answers with the status that the query of a request names.
pub(crate) const AUTHORIZERS: &str = "\
---
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    extensionProviders:
    - name: ask
      envoyExtAuthzHttp:
        {service: authorizer.shop.svc.cluster.local, port: 80, timeout: 20s, pathPrefix: /check}
    - name: gone
      envoyExtAuthzHttp: {service: gone.shop.svc.cluster.local, port: 80, timeout: 20s, statusOnError: '500'}
---
apiVersion: v1
kind: Pod
metadata: {name: authorizer, namespace: shop, labels: {app: authorizer, sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: authorizer, namespace: shop}
spec: {selector: {app: authorizer}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: gone, namespace: shop}
spec: {selector: {app: gone}, ports: [{name: http, port: 80, targetPort: 8080}]}
";

/// Packages of Envoy's filters for HTTP.
const FILTERS: &str = "type.googleapis.com/envoy.extensions.filters.http";

impl Random {
    /// Returns RateLimitPolicies that admit one request a day.
    pub(crate) fn rate_limits(&mut self) -> String {
        let mut text = String::new();
        let selectors = VERSIONS.map(|version| ("shop", format!("version: {version}")));
        for (number, (namespace, labels)) in
            selectors.into_iter().chain([("web", "istio: edge".to_owned())]).enumerate()
        {
            if self.chance(60) {
                continue;
            }
            let rules: String = (0..self.0.usize(1..=2)).map(|_| self.limit_rule()).collect();
            let _ = write!(
                text,
                "---\napiVersion: skysail.io/v1alpha1\nkind: RateLimitPolicy\n\
                 metadata: {{name: l{number}, namespace: {namespace}}}\n\
                 spec:\n  selector: {{matchLabels: {{{labels}}}}}\n  rules:\n{rules}"
            );
        }
        text
    }

    fn limit_rule(&mut self) -> String {
        let mut fields = vec!["limit: {requests: 1, unit: DAY}".to_owned()];
        let matched = match self.0.u32(..4) {
            0 => format!("paths: [{}]", self.one(&["/a*", "/c", "/a/b"])),
            1 => format!("headers: {{x-user: {{exact: {}}}}}", self.one(&VALUES)),
            2 => format!("withoutHeaders: {{x-user: {{prefix: {}}}}}, methods: [GET]", self.one(&VALUES)),
            _ => "notPrincipals: ['*/sa/front']".to_owned(),
        };
        fields.push(format!("match: {{{matched}}}"));
        let by = ["header: x-user", "method: true", "sourcePrincipal: true", "host: true", "route: true"];
        if self.chance(80) {
            let (one, two) = (self.one(&by[..2]), self.one(&by[2..]));
            fields.push(format!("by: [{{{one}}}, {{{two}}}]"));
        }
        if self.chance(30) {
            fields.push(format!("response: {{status: {}}}", self.one(&["418", "507"])));
        }
        if self.chance(15) {
            fields.push("shadow: true".to_owned());
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    /// Returns EnvoyFilters that change routes, clusters and filters.
    pub(crate) fn patches(&mut self) -> String {
        let mut text = String::new();
        for number in 0..self.0.usize(1..=4) {
            let (context, patch) = match self.0.u32(..9) {
                0 => self.route_patch(),
                1 => self.cluster_patch(),
                2 => self.http_filter("SIDECAR_INBOUND", "HeaderMutation"),
                3 => self.http_filter("SIDECAR_OUTBOUND", "HeaderMutation"),
                4 => self.http_filter("SIDECAR_OUTBOUND", "RBAC"),
                5 => self.http_filter("GATEWAY", "RBAC"),
                6 => self.http_filter("SIDECAR_INBOUND", "LocalRateLimit"),
                7 => self.network_filter(),
                _ => self.http_filter("SIDECAR_INBOUND", "RBAC"),
            };
            let (namespace, selector) = match context {
                "GATEWAY" => ("web", "istio: edge".to_owned()),
                "SIDECAR_OUTBOUND" => ("shop", "app: front".to_owned()),
                _ => ("shop", format!("version: {}", self.one(&VERSIONS))),
            };
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\n\
                 metadata: {{name: f{number}, namespace: {namespace}}}\nspec:\n  \
                 workloadSelector: {{labels: {{{selector}}}}}\n  configPatches:\n{patch}"
            );
        }
        text
    }

    fn route_patch(&mut self) -> (&'static str, String) {
        let host = format!("s{}.shop.svc.cluster.local:80", self.0.usize(..SERVICES));
        let path = self.one(&PATHS);
        let patch = match self.0.u32(..3) {
            0 => format!(
                "INSERT_FIRST, value: {{match: {{prefix: {path}}}, direct_response: {{status: 218}}}}"
            ),
            1 => "MERGE, value: {request_headers_to_remove: [x-user]}".to_owned(),
            _ => "MERGE, value: {direct_response: {status: 226}}".to_owned(),
        };
        let matched = format!("context: SIDECAR_OUTBOUND, routeConfiguration: {{vhost: {{name: '{host}'}}}}");
        let patch =
            format!("  - {{applyTo: HTTP_ROUTE, match: {{{matched}}}, patch: {{operation: {patch}}}}}\n");
        ("SIDECAR_OUTBOUND", patch)
    }

    fn cluster_patch(&mut self) -> (&'static str, String) {
        let service = format!("s{}.shop.svc.cluster.local", self.0.usize(..SERVICES));
        let subset = self.one(&VERSIONS);
        let cluster = format!("{{service: {service}, subset: {subset}}}");
        let patch = format!(
            "  - {{applyTo: CLUSTER, match: {{context: SIDECAR_OUTBOUND, cluster: {cluster}}}, \
             patch: {{operation: REMOVE}}}}\n"
        );
        ("SIDECAR_OUTBOUND", patch)
    }

    fn network_filter(&mut self) -> (&'static str, String) {
        let port = self.one(&["9000", "8080"]);
        let rules = format!(
            "{{action: DENY, policies: {{own: {{permissions: [{{destination_port: {port}}}], \
             principals: [{{any: true}}]}}}}}}"
        );
        let before = "listener: {filterChain: {filter: {name: envoy.filters.network.tcp_proxy}}}";
        let patch = format!(
            "  - applyTo: NETWORK_FILTER\n    match: {{context: SIDECAR_INBOUND, {before}}}\n    \
             patch:\n      operation: INSERT_BEFORE\n      value:\n        \
             name: own.rbac\n        typed_config:\n          \
             '@type': type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC\n          \
             stat_prefix: own\n          rules: {rules}\n"
        );
        ("SIDECAR_INBOUND", patch)
    }

    fn http_filter(&mut self, context: &'static str, kind: &str) -> (&'static str, String) {
        let value = self.one(&VALUES);
        let (package, config) = match kind {
            "RBAC" => (
                "rbac",
                format!(
                    "rules: {{action: {}, policies: {{own: {{permissions: [{{header: {{name: x-user, \
                     string_match: {{exact: {value}}}}}}}], principals: [{{any: true}}]}}}}}}",
                    self.one(&["DENY", "DENY", "DENY", "ALLOW"])
                ),
            ),
            "HeaderMutation" => (
                "header_mutation",
                format!(
                    "mutations: {{request_mutations: [{{append: {{header: {{key: x-user, value: {value}}}, \
                     append_action: {}}}}}]}}",
                    self.one(&["OVERWRITE_IF_EXISTS", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD"])
                ),
            ),
            _ => (
                "local_ratelimit",
                "stat_prefix: own, token_bucket: {max_tokens: 1, tokens_per_fill: 1, fill_interval: 86400s}, \
                 filter_enabled: {default_value: {numerator: 100}}, \
                 filter_enforced: {default_value: {numerator: 100}}"
                    .to_owned(),
            ),
        };
        let (operation, filter) = match self.one(&["first", "last"]) {
            "first" => ("INSERT_FIRST", ""),
            _ => ("INSERT_BEFORE", ", subFilter: {name: envoy.filters.http.router}"),
        };
        let manager = "envoy.filters.network.http_connection_manager";
        let place = format!("listener: {{filterChain: {{filter: {{name: {manager}{filter}}}}}}}");
        let patch = format!(
            "  - applyTo: HTTP_FILTER\n    match: {{context: {context}, {place}}}\n    patch:\n      \
             operation: {operation}\n      value:\n        name: own.{package}\n        \
             typed_config: {{'@type': {FILTERS}.{package}.v3.{kind}, {config}}}\n"
        );
        (context, patch)
    }
}
