//! The subscriptions and resources of a client, without sockets, for both forms of the protocol.
//!
//! The forms differ in two ways. A request contains the changes of the subscription, or all of it. A response shows a
//! removal by name, or by absence.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use skysail_proto::envoy::pb::{
    envoy::{
        config::core::v3::Node,
        service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
    },
    google::rpc,
};
use tracing::warn;

use super::{Form, NamesByKind, Options, Received, Rejection, Update};
use crate::{
    kind::Kind,
    wire::{DeltaResponse, HEALTH, SotwResponse, name_of},
};

/// `google.rpc.Code.INVALID_ARGUMENT`
const INVALID_ARGUMENT: i32 = 3;

/// A request of either form.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Outgoing {
    node: Option<Node>,
    type_url: &'static str,
    nonce: String,
    error: Option<String>,
    /// Incremental: changes of the subscription.
    subscribe: Vec<String>,
    unsubscribe: Vec<String>,
    /// Incremental: versions that the client has, by name.
    have: BTreeMap<String, String>,
    /// State of the world: the whole subscription and the version in use.
    names: Vec<String>,
    version: String,
}

impl Outgoing {
    /// Returns a health report; an error says why the workload is not healthy.
    pub(super) fn health(error: Option<String>) -> Self {
        Self { type_url: HEALTH, error, ..Self::default() }
    }

    pub(super) fn into_delta(self) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            node: self.node,
            type_url: self.type_url.into(),
            resource_names_subscribe: self.subscribe,
            resource_names_unsubscribe: self.unsubscribe,
            initial_resource_versions: self.have.into_iter().collect(),
            response_nonce: self.nonce,
            error_detail: self.error.map(status),
            ..DeltaDiscoveryRequest::default()
        }
    }

    pub(super) fn into_sotw(self) -> DiscoveryRequest {
        DiscoveryRequest {
            version_info: self.version,
            node: self.node,
            resource_names: self.names,
            type_url: self.type_url.into(),
            response_nonce: self.nonce,
            error_detail: self.error.map(status),
            ..DiscoveryRequest::default()
        }
    }
}

fn status(message: String) -> rpc::Status {
    rpc::Status { code: INVALID_ARGUMENT, message, details: Vec::new() }
}

/// A response of either form.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    type_url: String,
    nonce: String,
    /// The server is a Skysail control plane.
    pub(super) ours: bool,
    /// State of the world only.
    version: String,
    /// Name (empty: it is in the body), version and body.
    resources: Vec<(String, String, Bytes)>,
    removed: Vec<String>,
}

impl From<DeltaResponse> for Incoming {
    fn from(response: DeltaResponse) -> Self {
        let ours = response.is_ours();
        let resources = response
            .resources
            .into_iter()
            .map(|resource| {
                let body = resource.resource.map(|any| any.value).unwrap_or_default();
                (resource.name, resource.version, body)
            })
            .collect();
        Self {
            type_url: response.type_url,
            nonce: response.nonce,
            ours,
            version: String::new(),
            resources,
            removed: response.removed_resources,
        }
    }
}

impl From<SotwResponse> for Incoming {
    fn from(response: SotwResponse) -> Self {
        let version = &response.version_info;
        let resources =
            response.resources.into_iter().map(|any| (String::new(), version.clone(), any.value)).collect();
        Self {
            type_url: response.type_url,
            nonce: response.nonce,
            ours: false,
            version: response.version_info,
            resources,
            removed: Vec::new(),
        }
    }
}

/// A response that waits for the result of the handler.
#[derive(Debug)]
pub(super) struct Pending {
    kind: Kind,
    nonce: String,
    version: String,
    added: Vec<(String, String)>,
    removed: Vec<String>,
    undecodable: Vec<Rejection>,
}

impl Pending {
    /// Returns rejections of the resources without a readable name.
    pub(super) fn undecodable(&self) -> Vec<Rejection> {
        self.undecodable.clone()
    }
}

/// The state of a client across streams, and that of the current stream.
#[derive(Debug)]
pub(super) struct ClientState {
    options: Options,
    kinds: [PerKind; Kind::ALL.len()],
}

#[derive(Debug, Default)]
struct PerKind {
    /// Versions in use by name.
    have: BTreeMap<String, String>,
    /// State of the world: the version that was last accepted.
    version: String,
    /// This stream has requested the type.
    open: bool,
    /// Names that this stream subscribes to.
    subscribed: BTreeSet<String>,
    /// Virtual hosts that were sent unrequested. The client is still to confirm or decline them.
    unconfirmed: BTreeSet<String>,
    /// Nonce of the last response on this stream.
    nonce: String,
}

impl PerKind {
    /// Returns true if this stream subscribes to a name.
    fn subscribes(&self, kind: Kind, name: &str) -> bool {
        covers(kind, &self.subscribed, name) || self.unconfirmed.contains(name)
    }

    /// Returns true if a virtual host may be sent unrequested: the stream subscribes to the catch-all of its route
    /// configuration.
    fn may_be_unrequested(&self, kind: Kind, name: &str) -> bool {
        kind.family(name).is_some_and(|family| self.subscribed.contains(&format!("{family}/*")))
    }
}

/// Returns true if a subscription covers a name: by itself, by its family or by the wildcard.
fn covers(kind: Kind, subscribed: &BTreeSet<String>, name: &str) -> bool {
    let family = || kind.family(name).is_some_and(|family| subscribed.contains(family));
    subscribed.contains(name) || family() || subscribed.contains("*")
}

impl ClientState {
    pub(super) fn new(options: Options) -> Self {
        Self { options, kinds: Default::default() }
    }

    pub(super) fn form(&self) -> Form {
        self.options.form
    }

    /// Begins a new stream: returns the requests that subscribe to everything again, with the versions in use. The
    /// first one carries the node.
    pub(super) fn open(&mut self, wanted: &NamesByKind) -> Vec<Outgoing> {
        for kind in &mut self.kinds {
            kind.open = false;
            kind.subscribed.clear();
            kind.unconfirmed.clear();
            kind.nonce.clear();
        }
        let mut requests = self.wanted(wanted);
        if let Some(first) = requests.first_mut() {
            first.node = Some(self.options.node.clone());
        }
        requests
    }

    /// Returns the requests that change the subscriptions of the stream to `wanted`.
    pub(super) fn wanted(&mut self, wanted: &NamesByKind) -> Vec<Outgoing> {
        Kind::ALL.into_iter().filter_map(|kind| self.wanted_of(kind, &wanted[kind as usize])).collect()
    }

    fn wanted_of(&mut self, kind: Kind, wanted: &BTreeSet<String>) -> Option<Outgoing> {
        let wildcard = self.options.wildcard.contains(&kind);
        let state = &mut self.kinds[kind as usize];
        let first = !state.open;
        // An empty first request would mean all resources, so a type without a wildcard waits for a name.
        let same = state.subscribed == *wanted && state.unconfirmed.is_empty();
        if (first && !wildcard && wanted.is_empty()) || (!first && same) {
            return None;
        }
        let mut request = Outgoing { type_url: kind.url(), ..Outgoing::default() };
        request.subscribe = wanted.difference(&state.subscribed).cloned().collect();
        let unconfirmed = std::mem::take(&mut state.unconfirmed);
        request.unsubscribe =
            state.subscribed.union(&unconfirmed).filter(|name| !wanted.contains(*name)).cloned().collect();
        if wildcard {
            // Incremental: an empty first list means all. A list with names does not, so "*" is added.
            if first && !wanted.is_empty() {
                request.subscribe.push("*".into());
            }
        } else {
            state.have.retain(|name, _| covers(kind, wanted, name));
        }
        if first {
            request.have = state.have.clone();
        }
        request.names = wanted.iter().cloned().collect();
        request.version.clone_from(&state.version);
        if self.options.form == Form::Sotw {
            request.nonce.clone_from(&state.nonce);
        }
        state.open = true;
        state.subscribed.clone_from(wanted);
        Some(request)
    }

    /// Converts a response to an update; `None` for a type that the client does not know.
    pub(super) fn received(&mut self, response: Incoming) -> Option<(Update, Pending)> {
        let Some(kind) = Kind::from_url(&response.type_url) else {
            warn!(type_url = response.type_url, "the server sent an unknown resource type");
            return None;
        };
        let wildcard = self.options.wildcard.contains(&kind);
        let state = &mut self.kinds[kind as usize];
        state.nonce.clone_from(&response.nonce);
        let (mut added, mut undecodable) = (Vec::new(), Vec::new());
        for (name, version, body) in response.resources {
            match if name.is_empty() { name_of(kind, &body) } else { Some(name) } {
                Some(name) if !wildcard && !state.subscribes(kind, &name) => {
                    // A late response to a name that is no longer subscribed to is ignored.
                    if state.may_be_unrequested(kind, &name) {
                        state.unconfirmed.insert(name.clone());
                        added.push(Received { name, version, body });
                    }
                }
                Some(name) => added.push(Received { name, version, body }),
                None => undecodable.push(Rejection {
                    name: String::new(),
                    reason: "the name of the resource cannot be decoded".into(),
                }),
            }
        }
        let mut removed = response.removed;
        removed.retain(|name| wildcard || state.subscribes(kind, name));
        // In the state of the world, clusters and listeners that are missing in a response are removed. Responses of
        // the other types may carry a part of the resources.
        if self.options.form == Form::Sotw && wildcard && undecodable.is_empty() {
            let present: BTreeSet<&str> = added.iter().map(|resource| resource.name.as_str()).collect();
            removed.extend(state.have.keys().filter(|name| !present.contains(name.as_str())).cloned());
        }
        let pending = Pending {
            kind,
            nonce: response.nonce,
            version: response.version,
            added: added.iter().map(|resource| (resource.name.clone(), resource.version.clone())).collect(),
            removed: removed.clone(),
            undecodable,
        };
        Some((Update { kind, added, removed }, pending))
    }

    /// Records the result of the handler, and returns the ACK or NACK.
    pub(super) fn applied(&mut self, pending: Pending, rejections: &[Rejection]) -> Outgoing {
        let state = &mut self.kinds[pending.kind as usize];
        for name in pending.removed {
            state.have.remove(&name);
        }
        for (name, version) in pending.added {
            // A rejected resource keeps its former version, so that it is sent again on a new stream.
            if !rejections.iter().any(|rejection| rejection.name == name) {
                state.have.insert(name, version);
            }
        }
        let reasons: Vec<_> =
            rejections.iter().map(|rejection| format!("{}: {}", rejection.name, rejection.reason)).collect();
        if reasons.is_empty() {
            state.version = pending.version;
        }
        Outgoing {
            type_url: pending.kind.url(),
            nonce: pending.nonce,
            error: (!reasons.is_empty()).then(|| reasons.join("; ")),
            names: state.subscribed.iter().cloned().collect(),
            version: state.version.clone(),
            ..Outgoing::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(form: Form) -> ClientState {
        let node = Node { id: "sidecar~10.0.0.1~a.b~b.svc.cluster.local".into(), ..Node::default() };
        ClientState::new(Options { node, form, wildcard: vec![Kind::Cluster, Kind::Listener] })
    }

    fn wanting(kind: Kind, names: &[&str]) -> NamesByKind {
        let mut wanted = NamesByKind::default();
        wanted[kind as usize] = names.iter().map(|name| (*name).to_owned()).collect();
        wanted
    }

    fn response(kind: Kind, nonce: &str, names: &[(&str, &str)], removed: &[&str]) -> Incoming {
        Incoming {
            type_url: kind.url().into(),
            nonce: nonce.into(),
            ours: false,
            version: String::new(),
            resources: names
                .iter()
                .map(|(name, version)| ((*name).into(), (*version).into(), Bytes::new()))
                .collect(),
            removed: removed.iter().map(|name| (*name).into()).collect(),
        }
    }

    fn names(update: &Update) -> Vec<&str> {
        update.added.iter().map(|resource| resource.name.as_str()).collect()
    }

    #[test]
    fn virtual_hosts_follow_the_subscribed_route_configurations() {
        let mut state = state(Form::Delta);
        let wanted = wanting(Kind::VirtualHost, &["80"]);
        let opened = state.open(&wanted);
        assert_eq!(opened.last().unwrap().subscribe, ["80"]);
        let hosts = response(Kind::VirtualHost, "1", &[("80/a", "1"), ("8080/a", "1")], &["80/b", "8080/b"]);
        let (update, pending) = state.received(hosts).unwrap();
        assert_eq!((names(&update), &update.removed), (vec!["80/a"], &vec!["80/b".to_owned()]));
        state.applied(pending, &[]);
        let opened = state.open(&wanted);
        assert_eq!(opened.last().unwrap().have, BTreeMap::from([("80/a".into(), "1".into())]));
    }

    #[test]
    fn unrequested_virtual_hosts_are_confirmed_or_declined() {
        let mut state = state(Form::Delta);
        let opened = state.open(&wanting(Kind::VirtualHost, &["80/*", "80/a"]));
        assert_eq!(opened.last().unwrap().subscribe, ["80/*", "80/a"]);
        let hosts = [("80/a:80", "1"), ("80/b:80", "1"), ("81/c:81", "1")];
        let (update, pending) =
            state.received(response(Kind::VirtualHost, "1", &hosts, &["80/*", "80/a"])).unwrap();
        assert_eq!(names(&update), ["80/a:80", "80/b:80"]);
        assert_eq!(update.removed, ["80/*", "80/a"]);
        state.applied(pending, &[]);
        let wanted = wanting(Kind::VirtualHost, &["80/*", "80/a:80"]);
        let subscribed = state.wanted(&wanted);
        assert_eq!(subscribed[0].subscribe, ["80/a:80"]);
        assert_eq!(subscribed[0].unsubscribe, ["80/a", "80/b:80"]);
        assert_eq!(state.wanted(&wanted), []);
        let opened = state.open(&wanted);
        assert_eq!(opened.last().unwrap().have, BTreeMap::from([("80/a:80".into(), "1".into())]));
    }

    #[test]
    fn a_wildcard_can_be_replaced_by_names() {
        let options = Options { node: Node::default(), form: Form::Delta, wildcard: vec![Kind::Listener] };
        let mut state = ClientState::new(options);
        state.open(&NamesByKind::default());
        let subscribed = state.wanted(&wanting(Kind::Cluster, &["*"]));
        assert_eq!(subscribed[0].subscribe, ["*"]);
        let (update, pending) =
            state.received(response(Kind::Cluster, "1", &[("a", "1"), ("b", "1")], &["c"])).unwrap();
        assert_eq!((names(&update), update.removed.as_slice()), (vec!["a", "b"], &["c".to_owned()][..]));
        state.applied(pending, &[]);
        let subscribed = state.wanted(&wanting(Kind::Cluster, &["a"]));
        assert_eq!(subscribed[0].subscribe, ["a"]);
        assert_eq!(subscribed[0].unsubscribe, ["*"]);
        let (update, _) =
            state.received(response(Kind::Cluster, "2", &[("a", "2"), ("b", "2")], &[])).unwrap();
        assert_eq!(names(&update), ["a"]);
    }

    #[test]
    fn incremental_client_lists_its_versions_on_the_next_stream() {
        let mut state = state(Form::Delta);
        let opened = state.open(&NamesByKind::default());
        assert_eq!(
            opened.iter().map(|r| r.type_url).collect::<Vec<_>>(),
            [Kind::Cluster.url(), Kind::Listener.url()]
        );
        assert!(opened[0].node.is_some() && opened[1].node.is_none());
        assert!(opened[0].subscribe.is_empty(), "empty means all");

        let (update, pending) =
            state.received(response(Kind::Cluster, "1", &[("a", "v1"), ("b", "v1")], &[])).unwrap();
        assert_eq!(names(&update), ["a", "b"]);
        let nack =
            state.applied(pending, &[Rejection { name: "b".into(), reason: "no".into() }]).into_delta();
        assert_eq!(nack.response_nonce, "1");
        assert_eq!(nack.error_detail.unwrap().message, "b: no");

        let wanted = wanting(Kind::Endpoint, &["a"]);
        let subscribed = state.wanted(&wanted);
        assert_eq!(subscribed.len(), 1);
        assert_eq!(subscribed[0].subscribe, ["a"]);
        assert_eq!(state.wanted(&wanted), []);
        let (_, pending) = state.received(response(Kind::Endpoint, "2", &[("a", "e1")], &[])).unwrap();
        assert_eq!(state.applied(pending, &[]).error, None);

        let again = state.open(&wanted);
        assert_eq!(again.len(), 3);
        assert_eq!(again[0].have, BTreeMap::from([("a".into(), "v1".into())]), "b was rejected");
        assert_eq!(again[1].have, BTreeMap::from([("a".into(), "e1".into())]));
        assert_eq!(again[1].nonce, "");

        let (update, pending) = state.received(response(Kind::Cluster, "1", &[], &["a"])).unwrap();
        assert_eq!(update.removed, ["a"]);
        state.applied(pending, &[]);
        assert_eq!(state.open(&wanted)[0].have, BTreeMap::new());
    }

    #[test]
    fn incremental_client_ignores_late_responses() {
        let mut state = state(Form::Delta);
        state.open(&wanting(Kind::Route, &["80", "90"]));
        let subscribed = state.wanted(&wanting(Kind::Route, &["90"]));
        assert_eq!(
            (subscribed[0].subscribe.len(), subscribed[0].unsubscribe.as_slice()),
            (0, &["80".to_owned()][..])
        );
        let (update, _) =
            state.received(response(Kind::Route, "1", &[("80", "1"), ("90", "1")], &["80"])).unwrap();
        assert_eq!(names(&update), ["90"]);
        assert!(update.removed.is_empty());
    }

    #[test]
    fn state_of_the_world_client_detects_removals_by_absence() {
        let mut state = state(Form::Sotw);
        let opened = state.open(&NamesByKind::default());
        assert!(opened[0].node.is_some());
        let (_, pending) = state
            .received(Incoming {
                version: "v1".into(),
                ..response(Kind::Cluster, "1", &[("a", "v1"), ("b", "v1")], &[])
            })
            .unwrap();
        let ack = state.applied(pending, &[]).into_sotw();
        assert_eq!((ack.version_info.as_str(), ack.response_nonce.as_str()), ("v1", "1"));

        let (update, pending) = state
            .received(Incoming { version: "v2".into(), ..response(Kind::Cluster, "2", &[("b", "v2")], &[]) })
            .unwrap();
        assert_eq!(update.removed, ["a"]);
        let nack = state.applied(pending, &[Rejection { name: "b".into(), reason: "no".into() }]).into_sotw();
        assert_eq!((nack.version_info.as_str(), nack.response_nonce.as_str()), ("v1", "2"));

        // A response of endpoints may carry a part of them.
        let wanted = wanting(Kind::Endpoint, &["a", "b"]);
        assert_eq!(state.wanted(&wanted)[0].names, ["a", "b"]);
        for name in ["a", "b"] {
            let (update, pending) =
                state.received(response(Kind::Endpoint, name, &[(name, "1")], &[])).unwrap();
            assert!(update.removed.is_empty());
            state.applied(pending, &[]);
        }
        let changed = state.wanted(&wanting(Kind::Endpoint, &["a", "c"]));
        assert_eq!(
            (changed[0].names.as_slice(), changed[0].nonce.as_str()),
            (&["a".into(), "c".into()][..], "b")
        );
    }
}
