//! Model-based test of a stream: after any requests and any changes, the client has in the end what it subscribes to.
//!
//! A script of bytes decides the steps. The client follows the protocol, except where the script has it send raw
//! bytes; after that the test only checks that nothing panics.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use prost::Message as _;
use skysail_proto::envoy::pb::envoy::config::cluster::v3::Cluster;

use super::{
    WireRequest,
    nonces::{Nonce, Nonces},
    state::{Session, SubscriptionRequest},
};
use crate::{
    grpc::PartialMessage,
    interest::{Change, Interest},
    kind::Kind,
    layer::{Layer, Snapshot},
    resource::Resource,
    wire::{DeltaRequest, DeltaResponse, Form, SotwRequest, SotwResponse, name_of},
};

/// Names of the resources of each type.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Names of the virtual hosts, two per route configuration.
const HOSTS: [&str; 4] = ["a/1", "a/2", "b/1", "b/2"];
/// Aliases of the virtual hosts.
const ALIASES: [&str; 2] = ["a/x", "b/x"];
/// Types in the incremental form. Virtual hosts on demand exist only in this form.
const KINDS: [Kind; 5] = [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route, Kind::VirtualHost];
/// Maximum length of a raw request in a script, in bytes.
const MAX_REQUEST: usize = 1 << 10;

/// Plays a script.
///
/// # Panics
/// A client that follows the protocol ends with a missing or an extra resource.
pub fn stream(script: &[u8]) {
    let [first, script @ ..] = script else { return };
    let first = *first;
    let form = self::form(first);
    let kinds = kinds(form);
    let mut model = Model::new(form, is_envoy(first));
    let mut rest = script;
    while let [what, argument, after @ ..] = rest {
        rest = after;
        let kind = kinds[usize::from(what >> 4) % kinds.len()];
        let name = name(kind, *argument);
        match what & 15 {
            0..=2 => {
                model.set(kind, name, argument >> 2);
                continue;
            }
            3 | 4 => {
                model.remove(kind, name);
                continue;
            }
            5 if kind == Kind::VirtualHost => {
                let alias = ALIASES[usize::from(*argument) % ALIASES.len()];
                model.change_subscription(kind, |names| {
                    if argument & 8 == 0 { names.insert(alias.to_owned()) } else { names.remove(alias) }
                });
            }
            5..=7 => model.change_subscription(kind, |names| names.insert(name.to_owned())),
            8 => model.change_subscription(kind, |names| names.remove(name)),
            9 => model.change_subscription(kind, |names| names.insert("*".to_owned())),
            10 => model.change_subscription(kind, |names| names.remove("*")),
            11 if kind == Kind::VirtualHost => {
                model.change_subscription(kind, |names| names.insert("a".to_owned()));
            }
            11 => model.change_subscription(kind, |_| true),
            12 | 13 => _ = model.read_response(argument % 4 != 0),
            14 => model.reconnect(),
            _ => {
                let (bytes, after) = rest.split_at(rest.len().min(usize::from(*argument)));
                rest = after;
                model.send_bytes(bytes);
            }
        }
        model.deliver();
    }
    model.finish();
}

fn form(first: u8) -> Form {
    if first.is_multiple_of(2) { Form::Delta } else { Form::Sotw }
}

/// Returns whether the client is an Envoy, which subscribes to the endpoints of each cluster when it reads the cluster.
fn is_envoy(first: u8) -> bool {
    first % 4 == 2
}

fn kinds(form: Form) -> &'static [Kind] {
    if form == Form::Delta { &KINDS } else { &KINDS[..4] }
}

fn name(kind: Kind, argument: u8) -> &'static str {
    let names = if kind == Kind::VirtualHost { HOSTS } else { NAMES };
    names[usize::from(argument) % names.len()]
}

/// Both ends of a stream, and the resources.
struct Model {
    form: Form,
    is_envoy: bool,
    world: Layer,
    generation: u64,
    session: Session,
    nonces: Nonces,
    interest: Arc<Interest>,
    kinds: BTreeMap<Kind, ModelType>,
    /// Encoded responses that the client has not read yet.
    in_flight: VecDeque<(Kind, Vec<u8>)>,
    /// The script had the client send raw bytes.
    raw: bool,
}

/// The client's state of one resource type.
#[derive(Default)]
struct ModelType {
    /// Names that the client subscribes to.
    names: BTreeSet<String>,
    /// Names with their versions (incremental) or bodies (state of the world).
    have: BTreeMap<String, Vec<u8>>,
    /// Nonce of the last response.
    nonce: String,
    /// State of the world: no names were listed on this stream, which means all for types with a wildcard.
    nameless: bool,
}

impl ModelType {
    fn watches(&self, kind: Kind, name: &str) -> bool {
        self.names.contains("*")
            || (self.nameless && kind.is_wildcard())
            || self.names.contains(name)
            || kind.family(name).is_some_and(|family| self.names.contains(family))
    }
}

impl Model {
    fn new(form: Form, is_envoy: bool) -> Self {
        let interest = Arc::<Interest>::default();
        Self {
            form,
            is_envoy,
            world: Layer::default(),
            generation: 1,
            session: Session::new(form, Arc::clone(&interest), Arc::default()).with_envoy(is_envoy),
            nonces: Nonces::new(),
            interest,
            kinds: BTreeMap::new(),
            in_flight: VecDeque::new(),
            raw: false,
        }
    }

    fn now(&self) -> Snapshot {
        Snapshot { shared: Arc::new(self.world.clone()), ..Snapshot::default() }
    }

    fn set(&mut self, kind: Kind, name: &str, value: u8) {
        self.generation += 1;
        let message = Cluster { name: name.into(), alt_stat_name: value.to_string(), ..Cluster::default() };
        let aliases = kind.family(name).filter(|_| value % 2 == 1).map(|family| format!("{family}/x"));
        let body = message.encode_to_vec().into();
        self.world.set(self.generation, Resource::with_aliases(kind, name, body, aliases.as_deref()));
        self.notify();
    }

    /// Delivers a change if it concerns the stream.
    fn notify(&mut self) {
        if self.interest.concerns(&Change::since(&self.world, self.generation - 1)) {
            self.deliver();
        }
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        self.generation += 1;
        self.world.remove(self.generation, kind, name);
        self.notify();
    }

    fn ask(&mut self, ask: SubscriptionRequest) {
        let now = self.now();
        self.session.request(ask, &now, &mut |_| {});
    }

    /// Changes the subscription of the client, or repeats it.
    fn change_subscription(&mut self, kind: Kind, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        let first = !self.kinds.contains_key(&kind);
        let side = self.kinds.entry(kind).or_default();
        let before = side.names.clone();
        change(&mut side.names);
        side.nameless = self.form == Form::Sotw && (first || side.nameless) && side.names.is_empty();
        // The client forgets resources that it no longer subscribes to.
        let mut have = std::mem::take(&mut side.have);
        have.retain(|name, _| side.watches(kind, name));
        side.have = have;
        let given = |names: &mut dyn Iterator<Item = &String>| names.cloned().collect();
        let ask = match self.form {
            Form::Sotw => SubscriptionRequest {
                kind,
                nonce: self.nonces.read(&side.nonce),
                names: given(&mut side.names.iter()),
                ..SubscriptionRequest::default()
            },
            Form::Delta => SubscriptionRequest {
                kind,
                names: given(&mut side.names.difference(&before)),
                unsubscribe: given(&mut before.difference(&side.names)),
                ..SubscriptionRequest::default()
            },
        };
        // The legacy wildcard: a first request without names.
        if self.form == Form::Delta && first && side.names.is_empty() && kind.is_wildcard() {
            side.names.insert("*".to_owned());
        }
        // A first incremental request without names means all, even if it unsubscribes from one.
        let says_nothing = self.form == Form::Delta && ask.names.is_empty() && ask.unsubscribe.is_empty();
        if first || !says_nothing {
            self.ask(ask);
        }
    }

    /// Sends the responses that are due to the client.
    fn deliver(&mut self) {
        let now = self.now();
        let Ok(pushes) = self.session.pushes(&now) else { return self.reconnect() };
        for push in pushes {
            let waits = self.in_flight.iter().any(|(kind, _)| *kind == push.kind);
            assert!(!waits, "two responses of {} are in flight", push.kind);
            let (kind, nonce) = (push.kind, self.nonces.text(push.number));
            let pieces = push.encode(nonce);
            let length = pieces.message_len();
            let bytes = pieces.collect::<Vec<_>>().concat();
            assert_eq!(bytes.len(), 5 + length);
            self.in_flight.push_back((kind, bytes[5..].to_vec()));
        }
    }

    /// Has the client read and answer one response. Returns false if there is none.
    fn read_response(&mut self, good: bool) -> bool {
        let Some((kind, bytes)) = self.in_flight.pop_front() else { return false };
        let side = self.kinds.entry(kind).or_default();
        let (mut confirmed, mut clusters) = (Vec::new(), Vec::new());
        match self.form {
            Form::Delta => {
                let response = DeltaResponse::decode(&*bytes);
                assert!(response.is_ok(), "{response:?}");
                let response = response.unwrap_or_default();
                side.nonce = response.nonce;
                let both =
                    response.resources.iter().find(|one| response.removed_resources.contains(&one.name));
                assert!(both.is_none(), "{kind} {both:?} is both sent and removed");
                for resource in response.resources {
                    // The client confirms a host that an alias resolved to.
                    let family = kind.family(&resource.name);
                    let given = family.is_some_and(|family| side.names.contains(&format!("{family}/x")));
                    if given && !side.watches(kind, &resource.name) {
                        side.names.insert(resource.name.clone());
                        confirmed.push(resource.name.clone());
                    }
                    if side.watches(kind, &resource.name) {
                        if kind == Kind::Cluster && self.is_envoy && good {
                            clusters.push(resource.name.clone());
                        }
                        side.have.insert(resource.name, resource.version.into_bytes());
                    }
                }
                response.removed_resources.iter().for_each(|name| _ = side.have.remove(name));
            }
            Form::Sotw => {
                let response = SotwResponse::decode(&*bytes);
                assert!(response.is_ok(), "{response:?}");
                let response = response.unwrap_or_default();
                side.nonce = response.nonce;
                if matches!(kind, Kind::Cluster | Kind::Listener) {
                    side.have.clear();
                }
                for any in response.resources {
                    let name = name_of(kind, &any.value).unwrap_or_default();
                    if side.watches(kind, &name) {
                        side.have.insert(name, any.value.to_vec());
                    }
                }
            }
        }
        let names = if self.form == Form::Sotw { side.names.iter().cloned().collect() } else { Vec::new() };
        let error = (!good).then(|| "no".to_owned());
        let nonce = self.nonces.read(&side.nonce);
        assert!(matches!(nonce, Nonce::Of(_)), "{nonce:?} of {kind}");
        self.ask(SubscriptionRequest { kind, nonce, error, names, ..SubscriptionRequest::default() });
        if !confirmed.is_empty() {
            self.ask(SubscriptionRequest { kind, names: confirmed, ..SubscriptionRequest::default() });
        }
        for cluster in clusters {
            self.change_subscription(Kind::Endpoint, |names| names.insert(cluster));
        }
        true
    }

    /// Opens a new stream, on which the client lists the versions that it has.
    fn reconnect(&mut self) {
        self.interest = Arc::default();
        let session = Session::new(self.form, Arc::clone(&self.interest), Arc::default());
        self.session = session.with_envoy(self.is_envoy);
        self.nonces = Nonces::new();
        self.in_flight.clear();
        let form = self.form;
        // A client without names sends no request: an empty one would mean all.
        self.kinds.retain(|_, side| form == Form::Sotw || !side.names.is_empty());
        let mut asks = Vec::new();
        for (kind, side) in &mut self.kinds {
            side.nonce.clear();
            side.nameless = form == Form::Sotw && side.names.is_empty();
            let text = |version: &Vec<u8>| String::from_utf8_lossy(version).into_owned();
            let have: Vec<_> =
                side.have.iter().map(|(name, version)| (name.clone(), text(version))).collect();
            let have = if form == Form::Delta { have.into_iter().collect() } else { Default::default() };
            asks.push(SubscriptionRequest {
                kind: *kind,
                names: side.names.iter().cloned().collect(),
                have,
                ..SubscriptionRequest::default()
            });
        }
        asks.into_iter().for_each(|ask| self.ask(ask));
    }

    /// Has the client send raw bytes.
    fn send_bytes(&mut self, bytes: &[u8]) {
        self.raw = true;
        let mut begun = PartialMessage::default();
        begun.0.extend_from_slice(bytes);
        loop {
            let ask = match self.form {
                Form::Delta => begun.complete::<DeltaRequest>(MAX_REQUEST).map(|one| self.parse(one)),
                Form::Sotw => begun.complete::<SotwRequest>(MAX_REQUEST).map(|one| self.parse(one)),
            };
            let Ok(Some(ask)) = ask else { return };
            if let Ok(ask) = ask {
                self.ask(ask);
                self.deliver();
            }
        }
    }

    fn parse<R: WireRequest>(&self, request: Option<R>) -> Option<Result<SubscriptionRequest, String>> {
        request.map(|request| request.into_request(&self.nonces))
    }

    /// Delivers and acknowledges all responses, then checks that the client has what it subscribes to.
    fn finish(mut self) {
        while self.read_response(true) || self.session.is_holding() {
            if self.in_flight.is_empty() {
                self.session.release();
            }
            self.deliver();
        }
        if self.raw {
            return;
        }
        let now = self.now();
        for (kind, side) in &self.kinds {
            let watched = now.iter(*kind).filter(|resource| side.watches(*kind, &resource.name));
            let expected: BTreeMap<String, Vec<u8>> = watched
                .map(|resource| {
                    let version = match self.form {
                        Form::Delta => resource.version_text().into_bytes(),
                        Form::Sotw => resource.body.to_vec(),
                    };
                    (resource.name.to_string(), version)
                })
                .collect();
            let whole = self.form == Form::Delta || matches!(kind, Kind::Cluster | Kind::Listener);
            // In the state of the world, no response says that a resource of these types is gone. The client drops it
            // by itself.
            let have: BTreeMap<_, _> =
                side.have.iter().filter(|(name, _)| whole || expected.contains_key(*name)).collect();
            assert_eq!(
                have,
                expected.iter().collect(),
                "{kind} of a client that subscribes to {:?}",
                side.names
            );
            for alias in
                side.names.iter().filter(|name| self.form == Form::Delta && ALIASES.contains(&name.as_str()))
            {
                let found = now.find(*kind, alias);
                assert!(
                    found.is_none_or(|host| side.have.contains_key(&*host.name)),
                    "{found:?} of {alias} is missing"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_all_subscribed_resources_in_the_end() {
        for seed in 0..5_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut script = vec![0; random.usize(2..80)];
            random.fill(&mut script);
            // One script in eight may contain raw bytes.
            if seed % 8 != 0 {
                script
                    .iter_mut()
                    .skip(1)
                    .step_by(2)
                    .filter(|what| **what & 15 == 15)
                    .for_each(|what| *what -= 1);
            }
            assert!(!fails(&script), "seed {seed}: {}", describe(&shortest(script)));
        }
    }

    /// A client unsubscribes from a name while its resource is in flight, the resource is deleted, and the client
    /// subscribes to all.
    #[test]
    fn a_resource_deleted_in_flight_is_removed() {
        stream(&[0, 0, 0, 5, 16, 8, 12, 3, 12, 9, 0]);
    }

    /// A client unsubscribes from the alias that resolved to a host, then subscribes again: to it, to the host, or to
    /// another alias.
    #[test]
    fn an_unconfirmed_host_is_sent_again() {
        stream(&[0, 64, 76, 69, 2, 69, 10, 76, 1, 69, 2]);
        stream(&[0, 64, 100, 69, 2, 149, 74, 109, 149, 71, 0]);
        stream(&[0, 144, 223, 69, 225, 73, 42, 140, 180, 221, 176, 74, 104]);
    }

    /// In the state of the world, a client subscribes to nothing and to all again while a response is in flight.
    #[test]
    fn resources_dropped_in_flight_are_sent_again() {
        stream(&[35, 17, 114, 89, 137, 89, 30, 204, 83, 154, 73, 217, 88]);
    }

    fn fails(script: &[u8]) -> bool {
        std::panic::catch_unwind(|| stream(script)).is_err()
    }

    /// Removes all steps from a failing script that the failure does not need.
    fn shortest(mut script: Vec<u8>) -> Vec<u8> {
        let mut at = 1;
        while at + 1 < script.len() {
            let shorter = [&script[..at], &script[at + 2..]].concat();
            if fails(&shorter) {
                script = shorter;
                at = 1;
            } else {
                at += 2;
            }
        }
        script
    }

    fn describe(script: &[u8]) -> String {
        let kinds = kinds(form(script[0]));
        let steps = script[1..].chunks(2).map(|step| {
            let kind = kinds[usize::from(step[0] >> 4) % kinds.len()];
            let argument = step.get(1).copied().unwrap_or_default();
            format!("{} {kind} {} ({argument})", step[0] & 15, name(kind, argument))
        });
        format!("{:?} {script:?}: {}", form(script[0]), steps.collect::<Vec<_>>().join(", "))
    }
}
