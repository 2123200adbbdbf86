//! The report as text.

mod layout;

use std::path::Path;

use skysail_proxy::explain::{EndpointReport, LimitReport};

use super::{
    ends::{State, percent},
    report::{
        CertificateStep, Destination, ExcludedStep, ExplainReport, FilterStep, Hop, Item, RouteStep,
        ServerStep, Source, TargetStep, TokenStep,
    },
};

/// Beginning of the names of rules of CUSTOM policies, as in Istio.
const CUSTOM: &str = "istio-ext-authz-";
/// Maximum difference of shares that count as equal.
const EVEN: f64 = 0.001;
/// Maximum number of routes that do not match, and of endpoints, in a list.
const MAX_LISTED: usize = 12;
/// Maximum number of places with the same result in a list.
const MAX_PLACES: usize = 8;
/// Maximum number of characters of a reason why a resource is refused.
const MAX_REASON: usize = 300;

/// Returns the report as text. Files below the folder `base` are shown relative to it.
pub(super) fn of(report: &ExplainReport, base: &Path) -> String {
    let unit = if report.request.is_connection() { "connections" } else { "requests" };
    let mut text = Text { out: String::new(), base, unit, decisions: Vec::new() };
    text.report(report);
    text.out.truncate(text.out.trim_end().len());
    text.out
}

struct Text<'a> {
    out: String,
    base: &'a Path,
    /// Unit of shares: `requests` or `connections`.
    unit: &'static str,
    /// Text of the decisions of each server's sidecar so far, and its workload.
    decisions: Vec<(String, String)>,
}

impl Text<'_> {
    fn report(&mut self, report: &ExplainReport) {
        self.line(0, &report.request.line());
        let from = &report.from;
        let mut client = format!("from {} ({}", from.workload, from.address);
        if let Some(principal) = &from.principal {
            client = format!("{client}, {principal}");
        }
        self.line(0, &format!("{client})"));
        if !report.errors.is_empty() {
            self.title("ERRORS IN THE CONFIGURATION: an object with an error may have no effect");
            report.errors.iter().for_each(|error| self.line(2, &self.relative(error)));
        }
        if let Some(dns) = &report.dns {
            self.title("NAME LOOKUP");
            if !dns.name.is_empty() {
                let addresses = list(&dns.addresses);
                self.field(dns.host.trim_end_matches('.'), &format!("{}: {addresses}", dns.name));
            }
            if !dns.note.is_empty() {
                self.field(&dns.host, &dns.note);
            }
        }
        if let Some(hop) = &report.client {
            self.title(&title(hop, ""));
            self.hop(hop);
        }
        for note in &report.notes {
            self.title("NOTE");
            self.line(2, note);
        }
        self.destinations(&report.destinations);
        let verdict = match report.state {
            State::Served => "SERVED",
            State::Refused | State::Closed => "REFUSED",
            State::Unknown => "NOT EXPLAINED",
        };
        self.title(&format!("{verdict}: {}", report.result));
    }

    /// Adds places. Of many, the first ones that serve the request and the first others are listed.
    fn destinations(&mut self, places: &[Destination]) {
        let (mut served, mut others) = (0, 0);
        let mut left = Vec::new();
        for to in places {
            let number = if to.served { &mut served } else { &mut others };
            *number += 1;
            if *number > MAX_PLACES {
                left.push(to);
            } else {
                self.destination(to);
            }
        }
        if !left.is_empty() {
            let share = percent(left.iter().map(|to| to.share).sum());
            let (number, places) = (left.len(), if left.len() == 1 { "place" } else { "places" });
            let served = served.saturating_sub(MAX_PLACES);
            let line =
                format!("{number} more {places}, {share} of the {}, {served} of them served", self.unit);
            self.title(&line);
        }
    }

    fn destination(&mut self, to: &Destination) {
        let (share, unit) = (percent(to.share), self.unit);
        if let Some(hop) = &to.hop {
            self.title(&title(hop, &format!(", {share} of the {unit}, at {}", to.endpoint)));
            let start = self.out.len();
            self.hop(hop);
            self.fold(hop, start);
            if !to.path.is_empty() && hop.direction == "inbound" && to.served {
                self.field("request", &format!("path {}, authority {}", to.path, to.authority));
            }
            self.destinations(&to.next);
        } else {
            let place =
                to.to.as_ref().map_or("DESTINATION".to_owned(), |to| format!("WORKLOAD {}", to.workload));
            let at = if to.endpoint.is_empty() { String::new() } else { format!(", at {}", to.endpoint) };
            self.title(&format!("{place}, {share} of the {unit}{at}"));
            self.source(to.to.as_ref().and_then(|to| to.source.as_ref()));
        }
        if to.next.is_empty() {
            let is_left_out = to.state == State::Unknown && to.hop.is_none();
            let unknown = if is_left_out { "not explained: " } else { "" };
            self.field("result", &format!("{unknown}{}", to.result));
        }
    }

    /// Replaces the text from `start`, the decisions of a server's sidecar, by a reference to an earlier
    /// sidecar with the same decisions, if there is one.
    fn fold(&mut self, hop: &Hop, start: usize) {
        let text = self.out.get(start..).unwrap_or_default().to_owned();
        if hop.direction != "inbound" {
            return;
        }
        match self.decisions.iter().find(|(known, _)| *known == text) {
            Some((_, first)) => {
                let line = format!("same as at the sidecar of {first}");
                self.out.truncate(start);
                self.field("decisions", &line);
            }
            None => self.decisions.push((text, hop.proxy.clone())),
        }
    }

    fn hop(&mut self, hop: &Hop) {
        self.connection(hop);
        if !hop.mtls_mode.is_empty() {
            let default = if hop.mtls_source.is_none() { " (default)" } else { "" };
            self.field("mTLS mode", &format!("{}{default}", hop.mtls_mode));
            self.source(hop.mtls_source.as_ref());
        }
        self.item("listener", &hop.listener);
        self.servers(&hop.servers);
        self.chains(hop);
        if !hop.virtual_host.is_empty() {
            self.field("virtual host", &format!("{} of route table {}", hop.virtual_host, hop.route_table));
        }
        self.excluded(&hop.excluded_matches);
        self.routes(&hop.routes);
        hop.filters.iter().for_each(|filter| self.filter(filter));
        if !hop.targets.is_empty() && hop.direction != "inbound" {
            self.limits(hop);
        }
        if hop.direction != "inbound" {
            hop.targets.iter().for_each(|target| self.target(target));
        }
        if !hop.mirrors.is_empty() {
            self.field("mirrors", &list(&hop.mirrors));
        }
        match (hop.outcome.kind, hop.outcome.status) {
            ("responded", Some(status)) => {
                self.field("responds", &format!("{status}: {}", hop.outcome.reason));
            }
            ("closed", _) => self.field("closes", &hop.outcome.reason),
            _ => {}
        }
        if !hop.on_demand.is_empty() {
            self.field("not held yet", &format!("{}: requested on demand", list(&hop.on_demand)));
        }
        for (name, reason) in hop.refused_resources.iter().take(MAX_LISTED) {
            self.field("not applied", &format!("{name}: {}", shortened(reason)));
        }
        self.more(hop.refused_resources.len(), "resources are not applied");
    }

    /// Adds the connection as the proxy receives it. The connection of a client to its own sidecar is left
    /// out, unless the client sends TLS itself.
    fn connection(&mut self, hop: &Hop) {
        if hop.direction == "outbound" && hop.server_name.is_empty() {
            return;
        }
        let mut connection = hop.transport.clone();
        if !hop.server_name.is_empty() {
            connection = format!("{connection}, SNI {}", hop.server_name);
        }
        if let Some(principal) = &hop.principal {
            let what = if principal.contains("://") { "principal" } else { "certificate of" };
            connection = format!("{connection}, {what} {principal}");
        }
        self.field("connection", &connection);
        if let Some(certificate) = &hop.certificate {
            self.certificate(certificate);
        }
    }

    fn certificate(&mut self, certificate: &CertificateStep) {
        let CertificateStep { name, verdict, reason } = certificate;
        let name = if name.is_empty() { "of the proxy before" } else { name };
        let words = match *verdict {
            "assumed" => {
                let of = reason.strip_prefix("kubernetes://").unwrap_or(reason);
                format!("assumed valid, because the CA certificates of {of} are not known here")
            }
            "not requested" => "not sent, because the server does not request it".to_owned(),
            "ignored" => format!("ignored, because it is not valid: {reason}"),
            other => other.to_owned(),
        };
        self.field("certificate", &format!("{name}: {words}"));
    }

    /// Adds the servers of a gateway.
    fn servers(&mut self, servers: &[ServerStep]) {
        let unmatched: Vec<&ServerStep> = servers.iter().filter(|server| !server.taken).collect();
        for server in unmatched.iter().take(MAX_LISTED) {
            self.field("not server", &format!("{}: {}", server.name, server.mismatch));
            self.source(server.source.as_ref());
        }
        self.more(unmatched.len(), "servers do not match");
        for server in servers.iter().filter(|server| server.taken) {
            self.field("server", &server.name);
            self.source(server.source.as_ref());
        }
    }

    /// Adds the selected filter chain. Adds the other chains only if neither the servers of a gateway nor the
    /// mutual TLS mode explain the selection.
    fn chains(&mut self, hop: &Hop) {
        let is_closed = hop.protocol.is_empty();
        let is_told = match hop.direction {
            "gateway" => hop.protocol == "tcp",
            "inbound" => is_closed && hop.filter_chain.name.is_empty(),
            _ => true,
        };
        let unmatched = if is_told { hop.unmatched_chains.as_slice() } else { &[] };
        for chain in unmatched.iter().take(MAX_LISTED) {
            self.field("not chain", &format!("{}{}", named(&chain.name), chain.mismatch));
        }
        self.more(unmatched.len(), "filter chains do not match");
        let name = match (hop.filter_chain.name.as_str(), hop.server_names.is_empty()) {
            ("", true) if hop.protocol == "tcp" => "of all connections to the port".to_owned(),
            ("", false) => format!("SNI {}", list(&hop.server_names)),
            (name, _) => name.to_owned(),
        };
        if !name.is_empty() && (hop.direction != "gateway" || hop.protocol == "tcp") {
            self.field("filter chain", &name);
            self.source(hop.filter_chain.source.as_ref());
        }
    }

    fn excluded(&mut self, matches: &[ExcludedStep]) {
        for step in matches.iter().take(MAX_LISTED) {
            self.field("not match", &step.mismatch);
            self.source(Some(&step.source));
        }
        self.more(matches.len(), "matches are for other clients");
    }

    fn routes(&mut self, routes: &[RouteStep]) {
        let unmatched: Vec<&RouteStep> = routes.iter().filter(|route| !route.taken).collect();
        for route in unmatched.iter().take(MAX_LISTED) {
            self.field(
                &format!("not route {}", route.index),
                &format!("{}{}", named(&route.name), route.mismatch),
            );
            self.source(route.source.as_ref());
        }
        self.more(unmatched.len(), "routes do not match");
        for route in routes.iter().filter(|route| route.taken) {
            let name = if route.name.is_empty() { "without a name" } else { &route.name };
            let part = route.share.map(|share| format!(", for {} of the requests", percent(share)));
            self.field(&format!("route {}", route.index), &format!("{name}{}", part.unwrap_or_default()));
            self.source(route.source.as_ref());
        }
    }

    fn filter(&mut self, filter: &FilterStep) {
        filter.tokens.iter().for_each(|token| self.token(token));
        if let Some(limit) = &filter.limit {
            self.limit(limit);
        } else if filter.action.is_empty() {
            if !filter.effect.is_empty() {
                self.field("filter", &format!("{}: {}", filter.name, filter.effect));
            }
        } else {
            let verdict = match (filter.allowed, filter.enforced) {
                (true, true) => "admits",
                (false, true) => "DENIES",
                (true, false) => "would admit (dry run)",
                (false, false) => "would deny (dry run)",
            };
            let (action, verdict) = match (is_custom(filter), filter.matched.is_empty()) {
                (false, _) => (filter.action, verdict),
                (true, false) => ("CUSTOM", "its provider decides"),
                (true, true) => ("CUSTOM", "its provider is not asked"),
            };
            let rule = match filter.matched.as_str() {
                "" => "no rule matches".to_owned(),
                rule => format!("rule {rule} matches"),
            };
            self.field("policy", &format!("{action} {verdict}: {rule}"));
        }
        let refuses = !filter.allowed && filter.matched.is_empty() && !filter.unmatched.is_empty();
        if !refuses {
            filter.sources.iter().take(MAX_LISTED).for_each(|source| self.source(Some(source)));
            self.more(filter.sources.len(), "objects");
            return;
        }
        // No rule allows the request, so each rule is listed with its reason.
        for unmatched in filter.unmatched.iter().take(MAX_LISTED) {
            self.field("not rule", &unmatched.mismatch);
            self.source(unmatched.source.as_ref());
        }
        self.more(filter.unmatched.len(), "rules do not match");
    }

    fn token(&mut self, token: &TokenStep) {
        let mut claims: Vec<String> =
            token.claims.iter().take(MAX_LISTED).map(|(name, value)| format!(", {name} {value}")).collect();
        if token.claims.len() > MAX_LISTED {
            claims.push(format!(", and {} more claims", token.claims.len() - MAX_LISTED));
        }
        let (label, verdict) = match token.refused.as_str() {
            "" => ("token", format!("valid, principal {}{}", token.principal, claims.concat())),
            reason => ("bad token", reason.to_owned()),
        };
        self.field(label, &format!("{}: {verdict}", token.place));
        let keys = &token.keys_from;
        if !token.unknown_keys.is_empty() {
            let line = format!(
                "its signature is assumed valid, because the keys of {keys} are not fetched here; --jwks FILE \
                 verifies it"
            );
            self.field("", &line);
        } else if !keys.is_empty() && !token.refused.is_empty() {
            self.field("", &format!("the keys are those of {keys}"));
        }
        self.source(token.source.as_ref());
    }

    fn limit(&mut self, limit: &LimitReport) {
        let effect = if limit.enforced <= 0.0 {
            "requests above it are only counted".to_owned()
        } else if limit.enforced >= 1.0 {
            format!("{} above it", limit.status)
        } else {
            format!("{} above it for {}", limit.status, percent(limit.enforced))
        };
        let is_idle = limit.buckets.is_empty() && (limit.service.is_empty() || limit.descriptors.is_empty());
        if is_idle {
            let reason =
                limit.unmet.first().map_or("no descriptor of the request has a limit", String::as_str);
            self.field("not limit", reason);
            return;
        }
        for bucket in &limit.buckets {
            let of = match (bucket.descriptor.as_str(), limit.per_connection) {
                ("", false) => "for all requests to this proxy".to_owned(),
                ("", true) => "for each connection".to_owned(),
                (descriptor, _) => format!("for {descriptor}"),
            };
            let effect = if bucket.is_shadow { "requests above it are only counted" } else { &effect };
            let line = format!("{} in {} s, {} at once,", bucket.requests, bucket.seconds, bucket.at_once);
            self.field("limit", &format!("{line} {of}; {effect}"));
        }
        if !limit.service.is_empty() {
            let named: Vec<&str> =
                limit.descriptors.iter().map(String::as_str).filter(|words| !words.is_empty()).collect();
            let of = if named.is_empty() { "all requests".to_owned() } else { named.join("; ") };
            self.field("limit", &format!("of the service {}, for {of}; {effect}", limit.service));
        }
    }

    fn limits(&mut self, hop: &Hop) {
        let seconds = |limit: Option<f64>| limit.map_or("none".to_owned(), |limit| format!("{limit} s"));
        let idle = seconds(hop.idle_timeout);
        self.field("timeout", &format!("{}; idle {idle}", seconds(hop.timeout)));
        self.source(hop.timeout_source.as_ref());
        if hop.protocol == "tcp" {
            return;
        }
        match &hop.retry {
            Some(retry) => {
                let each = retry.per_try_timeout.map(|each| format!(", {each} s each")).unwrap_or_default();
                self.field("retries", &format!("{}{each} on {}", retry.retries, retry.on.join(", ")));
                let by = hop.retry_source.as_ref();
                self.source(by);
            }
            None => self.field("retries", "none"),
        }
    }

    fn target(&mut self, target: &TargetStep) {
        self.field("cluster", &format!("{}, {}", target.cluster, percent(target.share)));
        self.source(target.source.as_ref());
        target.services.iter().take(MAX_LISTED).for_each(|service| self.source(Some(service)));
        self.more(target.services.len(), "Services");
        if !target.failure.is_empty() {
            self.field("", &format!("fails: {}", target.failure));
        }
        if target.share <= 0.0 {
            return;
        }
        for (label, change) in
            [("path becomes", &target.rewritten_path), ("host becomes", &target.rewritten_host)]
        {
            change.iter().for_each(|change| self.field(label, change));
        }
        if !target.header_changes.is_empty() {
            self.field("headers", &target.header_changes.join(", "));
        }
        if !target.resolves.is_empty() {
            self.field("endpoints", &format!("the addresses of {}", list(&target.resolves)));
        }
        if target.endpoints.is_empty() {
            return;
        }
        let candidates = target.endpoints.iter().filter(|endpoint| endpoint.is_candidate).count();
        let count = target.endpoints.len();
        let connect = target.connect_timeout;
        let line = format!("{candidates} of {count}, {}, connect timeout {connect} s", target.balancer);
        self.field("endpoints", &line);
        let mut shares = target.endpoints.iter().filter(|of| of.is_candidate).map(|of| of.share);
        let first = shares.next().unwrap_or_default();
        let is_even = shares.all(|share| (share - first).abs() < EVEN);
        for endpoint in target.endpoints.iter().take(MAX_LISTED) {
            let mut line = endpoint.address.clone();
            if !endpoint.locality.is_empty() {
                line = format!("{line} in {}", endpoint.locality);
            }
            let tls = match &endpoint.tls {
                None => "plain text".to_owned(),
                Some(tls) if tls.is_mesh => "mutual TLS of the mesh".to_owned(),
                Some(tls) => format!("TLS, SNI {}", tls.server_name),
            };
            let part = if is_even { String::new() } else { format!(", {}", percent(endpoint.share)) };
            self.field("", &format!("{line}, {tls}{part}{}", state(endpoint)));
        }
        self.more(target.endpoints.len(), "endpoints");
        if target.ejections == "unknown" {
            self.field("", "ejections by outlier detection are not known, and not considered");
        }
    }

    /// Adds the number of the items that a list leaves out.
    fn more(&mut self, all: usize, what: &str) {
        if all > MAX_LISTED {
            self.field("", &format!("{} more {what}", all - MAX_LISTED));
        }
    }

    fn item(&mut self, label: &str, item: &Item) {
        if !item.name.is_empty() {
            self.field(label, &item.name);
            self.source(item.source.as_ref());
        }
    }
}

/// Returns whether a filter has the rules of CUSTOM policies, which select the requests about which a
/// provider decides.
fn is_custom(filter: &FilterStep) -> bool {
    let mut rules = filter.unmatched.iter().map(|rule| &rule.rule).chain([&filter.matched]);
    !filter.enforced && rules.any(|rule| rule.starts_with(CUSTOM))
}

/// Returns the state of an endpoint as the end of a line.
fn state(endpoint: &EndpointReport) -> String {
    match (endpoint.is_candidate, endpoint.health) {
        (true, "healthy") => String::new(),
        (true, health) => format!("; {health}, but used because too few endpoints are healthy"),
        (false, _) => format!("; {}", endpoint.unused),
    }
}

fn title(hop: &Hop, rest: &str) -> String {
    match hop.direction {
        "gateway" => format!("GATEWAY {}{rest}", hop.proxy),
        "inbound" => format!("INBOUND at the sidecar of {}{rest}", hop.proxy),
        _ => format!("OUTBOUND at the sidecar of {}{rest}", hop.proxy),
    }
}

fn named(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("{name}: ") }
}

/// Returns the first characters of a reason.
fn shortened(reason: &str) -> String {
    match reason.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", reason.get(..end).unwrap_or_default()),
        None => reason.to_owned(),
    }
}

/// Joins the first items of a list.
fn list(items: &[String]) -> String {
    let shown: Vec<&str> = items.iter().take(MAX_LISTED).map(String::as_str).collect();
    let more = items.len().saturating_sub(MAX_LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_have_their_health_or_the_reason_why_they_are_not_used() {
        let of = |health, unused: &str| {
            let (address, locality, tls) = ("10.0.0.1:80".to_owned(), String::new(), None);
            let (is_healthy, is_ejected, is_candidate) =
                (health == "healthy", health == "ejected", unused.is_empty());
            let (priority, weight, share, unused) = (0, 1, 0.0, unused.to_owned());
            state(&EndpointReport {
                address,
                locality,
                priority,
                weight,
                health,
                is_healthy,
                is_ejected,
                share,
                is_candidate,
                unused,
                tls,
            })
        };
        assert_eq!(of("healthy", ""), "");
        assert_eq!(of("draining", ""), "; draining, but used because too few endpoints are healthy");
        assert_eq!(of("ejected", "ejected by outlier detection"), "; ejected by outlier detection");
        assert_eq!(of("healthy", "its locality has no weight"), "; its locality has no weight");
    }

    #[test]
    fn long_reasons_and_lists_are_cut() {
        assert_eq!(shortened(&"é".repeat(300)), "é".repeat(300));
        assert_eq!(shortened(&"é".repeat(301)), "é".repeat(300) + "…");
        let mut text =
            Text { out: String::new(), base: Path::new(""), unit: "requests", decisions: Vec::new() };
        text.more(MAX_LISTED, "endpoints");
        assert!(text.out.is_empty(), "{}", text.out);
        text.more(MAX_LISTED + 2, "endpoints");
        assert_eq!(text.out.trim(), "2 more endpoints");
    }
}
