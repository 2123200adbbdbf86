//! Encoding and decoding of discovery messages.
//!
//! The generated types of Envoy would copy the body of each resource into a vector, and its type URL and name into
//! strings, for every stream. Here, a response consists of pieces that all streams share, and a few bytes of its own.
//! In received messages, bodies are slices of the received bytes.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Deref,
    sync::Arc,
};

use bytes::{BufMut, Bytes, BytesMut};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint},
};

use crate::{
    digits::{Decimal, hex},
    kind::Kind,
    resource::Resource,
};

/// Methods of the aggregated discovery service for each form.
pub(crate) const DELTA: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
pub(crate) const SOTW: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// Maximum length of a received message, in bytes. A whole mesh must fit; gRPC's default of 4 MiB holds some 2,000
/// services.
pub(crate) const MAX_MESSAGE: usize = 512 << 20;
/// Type of health reports, as Istio's agents send them. A report is a request without names; an error says why the
/// workload is not healthy.
pub(crate) const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";
/// First byte of a gRPC message.
const NOT_COMPRESSED: u8 = 0;
/// Length from which bodies are not copied, in bytes.
const BY_REFERENCE: usize = 4 << 10;
/// Length of a copied piece of a response, in bytes.
const PIECE_LENGTH: usize = 32 << 10;
/// Minimum length of a part, in bytes. A part also ends with a resource whose version is a multiple of
/// `PART_RESOURCES`.
const MIN_PART: usize = 64 << 10;
const PART_RESOURCES: u64 = 64;
/// Control plane identifier in the first response of a stream. A client that reads it may subscribe to virtual hosts
/// by authority.
const SERVER: &str = "skysail";
/// Length of [`Resource::version_text`].
const VERSION_LEN: usize = 16;

/// Maximum length of a nonce: 20 decimal digits, a hyphen, 16 hexadecimal digits.
const MAX_NONCE: usize = 37;

/// Form of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Incremental: a response carries what changed since the last one.
    Delta,
    /// State of the world: a response carries all resources of a type, or of the subscribed names.
    Sotw,
}

/// A response to send.
#[derive(Clone, Debug)]
pub(crate) struct Push {
    pub(crate) form: Form,
    pub(crate) kind: Kind,
    /// Number of the response on the stream, from 1.
    pub(crate) number: u64,
    pub(crate) resources: Vec<Arc<Resource>>,
    /// More resources, encoded once for all streams that are sent them.
    pub(crate) shared: EncodedSequence,
    /// Incremental only.
    pub(crate) removed: Vec<Arc<str>>,
}

/// Text of a nonce.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NonceText {
    bytes: [u8; MAX_NONCE],
    length: usize,
}

/// A sequence of resources as encoded in a response, once for all streams that are sent the same.
///
/// A changed sequence shares unchanged parts with its former version. A client that reads slowly therefore holds only
/// the changed parts of the former version, not all of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncodedSequence {
    pub(crate) count: usize,
    /// In bytes.
    length: usize,
    parts: Arc<[Arc<Part>]>,
}

/// Consecutive resources of a sequence.
#[derive(Debug)]
struct Part {
    resources: Box<[Arc<Resource>]>,
    bytes: Bytes,
}

impl EncodedSequence {
    /// Encodes a sequence. Equal parts are taken from `former`, which has the same form.
    pub(crate) fn encode<'a>(
        form: Form,
        resources: impl Iterator<Item = &'a Arc<Resource>>,
        former: Option<&Self>,
    ) -> Self {
        let resources: Vec<_> = resources.map(Arc::clone).collect();
        let first = |part: &[Arc<Resource>]| part.first().map(Arc::as_ptr);
        let former = former.iter().flat_map(|row| row.parts.iter());
        let former: HashMap<_, _> = former.map(|part| (first(&part.resources), part)).collect();
        // The end of a part depends only on its resources, so a change moves the ends of few parts.
        let mut length = 0;
        let ends = |resource: &Arc<Resource>| {
            length += nested_len(entry_len(form, resource));
            let ends = length >= MIN_PART || resource.version.is_multiple_of(PART_RESOURCES);
            if ends {
                length = 0;
            }
            ends
        };
        let parts = resources.split_inclusive(ends).map(|part| match former.get(&first(part)) {
            Some(same) if same.is_of(part) => Arc::clone(same),
            _ => Arc::new(Part::encode(form, part)),
        });
        let parts: Arc<[_]> = parts.collect();
        Self { count: resources.len(), length: parts.iter().map(|part| part.bytes.len()).sum(), parts }
    }

    /// Returns the parts that contain none of these names, and from the other parts the resources with other names.
    pub(crate) fn without<V>(&self, names: &BTreeMap<Arc<str>, V>) -> (Self, Vec<Arc<Resource>>) {
        let has_none = |part: &&Arc<Part>| part.resources.iter().all(|one| !names.contains_key(&one.name));
        let (kept, left_out): (Vec<&Arc<Part>>, Vec<&Arc<Part>>) = self.parts.iter().partition(has_none);
        let rest = left_out.iter().flat_map(|part| part.resources.iter());
        let rest = rest.filter(|one| !names.contains_key(&one.name)).map(Arc::clone).collect();
        let parts: Arc<[Arc<Part>]> = kept.into_iter().map(Arc::clone).collect();
        let count = parts.iter().map(|part| part.resources.len()).sum();
        (Self { count, length: parts.iter().map(|part| part.bytes.len()).sum(), parts }, rest)
    }

    #[cfg(test)]
    pub(crate) fn resources(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.parts.iter().flat_map(|part| part.resources.iter())
    }

    /// Returns the number of bytes that are not shared with another sequence.
    #[cfg(test)]
    pub(crate) fn own_bytes(&self, other: &Self) -> usize {
        let is_own = |part: &&Arc<Part>| !other.parts.iter().any(|other| Arc::ptr_eq(part, other));
        self.parts.iter().filter(is_own).map(|part| part.bytes.len()).sum()
    }
}

impl Part {
    fn encode(form: Form, resources: &[Arc<Resource>]) -> Self {
        let length = resources.iter().map(|resource| nested_len(entry_len(form, resource))).sum();
        let mut bytes = BytesMut::with_capacity(length);
        for resource in resources {
            entry_start(form, resource, &mut bytes);
            bytes.put_slice(&resource.body);
        }
        Self { resources: resources.into(), bytes: bytes.freeze() }
    }

    fn is_of(&self, resources: &[Arc<Resource>]) -> bool {
        self.resources.len() == resources.len()
            && self.resources.iter().zip(resources).all(|(one, other)| Arc::ptr_eq(one, other))
    }
}

impl NonceText {
    /// Joins parts; one that does not fit is left out.
    pub(crate) fn of(parts: &[&[u8]]) -> Self {
        let mut text = Self { bytes: [0; MAX_NONCE], length: 0 };
        for part in parts {
            let end = text.length + part.len();
            if let Some(place) = text.bytes.get_mut(text.length..end) {
                place.copy_from_slice(part);
                text.length = end;
            }
        }
        text
    }
}

impl Deref for NonceText {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl Push {
    /// Returns the number of resources.
    pub(crate) fn count(&self) -> usize {
        self.resources.len() + self.shared.count
    }

    fn is_first(&self) -> bool {
        self.form == Form::Delta && self.number == 1
    }

    /// Encodes the `DeltaDiscoveryResponse` or `DiscoveryResponse` as a gRPC message.
    pub(crate) fn encode(self, nonce: NonceText) -> Pieces {
        let copied = |resource: &&Arc<Resource>| resource.body.len() < BY_REFERENCE;
        let copies: usize = self.resources.iter().filter(copied).map(|resource| resource.body.len()).sum();
        let room = 256 + 160 * self.resources.len() + 64 * self.removed.len() + copies;
        let entries = self.resources.iter().map(|resource| nested_len(entry_len(self.form, resource)));
        let removed = self.removed.iter().map(|name| text_len(name));
        let length = entries.chain(removed).sum::<usize>()
            + self.shared.length
            + nested_len(Decimal::new(self.number).as_bytes().len())
            + nested_len(nonce.len())
            + text_len(self.kind.url())
            + if self.is_first() { nested_len(text_len(SERVER)) } else { 0 };
        Pieces { push: self, nonce, length, room, next: 0, open: BytesMut::new(), body: None }
    }
}

/// A response that is encoded as far as the client reads, so that a slow client holds only references to resources.
/// Long bodies are not copied.
#[derive(Debug)]
pub(crate) struct Pieces {
    push: Push,
    nonce: NonceText,
    length: usize,
    /// Estimate of the bytes that are still to be copied.
    room: usize,
    /// Index of the next part.
    next: usize,
    /// Bytes that are being written.
    open: BytesMut,
    /// Body that follows the last piece.
    body: Option<Bytes>,
}

impl Pieces {
    /// Returns the length of the message, without the prefix of gRPC.
    pub(crate) fn message_len(&self) -> usize {
        self.length
    }

    /// Writes the next part, except for a body that is not copied. Returns false if there are no more.
    fn write(&mut self) -> bool {
        let Push { form, kind, number, resources, shared, removed } = &self.push;
        let out = &mut self.open;
        let part = self.next;
        self.next += 1;
        if part == 0 {
            out.put_u8(NOT_COMPRESSED);
            // No client can receive a longer message.
            out.put_u32(u32::try_from(self.length).unwrap_or(u32::MAX));
            bytes(1, Decimal::new(*number).as_bytes(), out);
            text(4, kind.url(), out);
            bytes(5, &self.nonce, out);
            if self.push.is_first() {
                header(7, text_len(SERVER), out);
                text(1, SERVER, out);
            }
        } else if let Some(resource) = resources.get(part - 1) {
            entry_start(*form, resource, out);
            if resource.body.len() < BY_REFERENCE {
                out.put_slice(&resource.body);
            } else {
                self.body = Some(resource.body.clone());
            }
        } else if let Some(part) = shared.parts.get(part - resources.len() - 1) {
            self.body = Some(part.bytes.clone());
        } else if let Some(name) = removed.get(part - resources.len() - shared.parts.len() - 1) {
            text(6, name, out);
        } else {
            return false;
        }
        true
    }
}

impl Iterator for Pieces {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if let Some(body) = self.body.take() {
            return Some(body);
        }
        if self.open.capacity() < self.room.min(2 * BY_REFERENCE) {
            self.open.reserve(self.room.min(PIECE_LENGTH + BY_REFERENCE));
        }
        let mut is_last = false;
        while self.open.len() < PIECE_LENGTH && self.body.is_none() && !is_last {
            is_last = !self.write();
        }
        self.room = if is_last { 0 } else { self.room.saturating_sub(self.open.len()) };
        if self.open.is_empty() {
            return self.body.take();
        }
        // The last piece needs no counted reference to the rest of the buffer.
        Some(if is_last { std::mem::take(&mut self.open) } else { self.open.split() }.freeze())
    }
}

/// Returns the length of a resource in a response, without its own key and length.
fn entry_len(form: Form, resource: &Resource) -> usize {
    let any = any_len(resource);
    match form {
        Form::Sotw => any,
        Form::Delta => nested_len(VERSION_LEN) + text_len(&resource.name) + nested_len(any),
    }
}

/// Writes a resource in a response up to its body.
fn entry_start(form: Form, resource: &Resource, out: &mut BytesMut) {
    header(2, entry_len(form, resource), out);
    if form == Form::Delta {
        bytes(1, &hex(resource.version), out);
        text(3, &resource.name, out);
        header(2, any_len(resource), out);
    }
    text(1, resource.kind.url(), out);
    header(2, resource.body.len(), out);
}

/// Returns the length of a resource's `Any`. An empty body is written as well, which decodes like an absent one.
fn any_len(resource: &Resource) -> usize {
    text_len(resource.kind.url()) + nested_len(resource.body.len())
}

/// Returns the length of a nested field. Field numbers are below 16 here, so a key is one byte.
fn nested_len(content: usize) -> usize {
    1 + encoded_len_varint(content as u64) + content
}

fn text_len(text: &str) -> usize {
    nested_len(text.len())
}

fn header(field: u32, length: usize, out: &mut BytesMut) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(length as u64, out);
}

fn text(field: u32, text: &str, out: &mut BytesMut) {
    bytes(field, text.as_bytes(), out);
}

fn bytes(field: u32, content: &[u8], out: &mut BytesMut) {
    header(field, content.len(), out);
    out.put_slice(content);
}

/// Fields of `DeltaDiscoveryRequest` that the server uses. The node is decoded only in the first request of a stream.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeltaRequest {
    #[prost(bytes = "bytes", optional, tag = "1")]
    pub(crate) node: Option<Bytes>,
    #[prost(string, tag = "2")]
    pub(crate) type_url: String,
    #[prost(string, repeated, tag = "3")]
    pub(crate) resource_names_subscribe: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(crate) resource_names_unsubscribe: Vec<String>,
    #[prost(map = "string, string", tag = "5")]
    pub(crate) initial_resource_versions: HashMap<String, String>,
    #[prost(string, tag = "6")]
    pub(crate) response_nonce: String,
    #[prost(message, optional, tag = "7")]
    pub(crate) error_detail: Option<ErrorDetail>,
}

/// Fields of `DiscoveryRequest` that the server uses.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SotwRequest {
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub(crate) node: Option<Bytes>,
    #[prost(string, repeated, tag = "3")]
    pub(crate) resource_names: Vec<String>,
    #[prost(string, tag = "4")]
    pub(crate) type_url: String,
    #[prost(string, tag = "5")]
    pub(crate) response_nonce: String,
    #[prost(message, optional, tag = "6")]
    pub(crate) error_detail: Option<ErrorDetail>,
}

/// `google.rpc.Status` without its details.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ErrorDetail {
    #[prost(string, tag = "2")]
    pub(crate) message: String,
}

/// Received `DeltaDiscoveryResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeltaResponse {
    #[prost(message, repeated, tag = "2")]
    pub(crate) resources: Vec<DeltaResource>,
    #[prost(string, tag = "4")]
    pub(crate) type_url: String,
    #[prost(string, tag = "5")]
    pub(crate) nonce: String,
    #[prost(string, repeated, tag = "6")]
    pub(crate) removed_resources: Vec<String>,
    #[prost(message, optional, tag = "7")]
    pub(crate) control_plane: Option<ControlPlane>,
}

/// `envoy.config.core.v3.ControlPlane`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ControlPlane {
    #[prost(string, tag = "1")]
    pub(crate) identifier: String,
}

impl DeltaResponse {
    /// Returns true if the server is a Skysail control plane.
    pub(crate) fn is_ours(&self) -> bool {
        self.control_plane.as_ref().is_some_and(|server| server.identifier == SERVER)
    }
}

/// `envoy.service.discovery.v3.Resource`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeltaResource {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) resource: Option<RawAny>,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
}

/// Received `DiscoveryResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SotwResponse {
    #[prost(string, tag = "1")]
    pub(crate) version_info: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) resources: Vec<RawAny>,
    #[prost(string, tag = "4")]
    pub(crate) type_url: String,
    #[prost(string, tag = "5")]
    pub(crate) nonce: String,
}

/// `google.protobuf.Any` whose value is not copied.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RawAny {
    #[prost(string, tag = "1")]
    pub(crate) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) value: Bytes,
}

/// Returns the name in a resource's body. All types have it in field 1, except for the name table, of which there is
/// one.
pub(crate) fn name_of(kind: Kind, body: &Bytes) -> Option<String> {
    #[derive(Clone, PartialEq, Message)]
    struct Named {
        #[prost(string, tag = "1")]
        name: String,
    }
    if kind == Kind::NameTable {
        return Some(String::new());
    }
    Named::decode(body.clone()).ok().map(|named| named.name)
}

#[cfg(test)]
mod tests {
    use skysail_proto::envoy::pb::{
        envoy::{
            config::cluster::v3::Cluster,
            service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse},
        },
        google::protobuf::Any,
    };

    use super::*;

    /// Returns a push of three resources, one in each way to send them: copied, by reference, and shared.
    fn push(form: Form) -> (Push, Vec<Any>) {
        let clusters = [("a", 1), ("outbound|80||b", BY_REFERENCE), ("c", 1)].map(|(name, length)| Cluster {
            name: name.into(),
            alt_stat_name: "x".repeat(length),
            ..Cluster::default()
        });
        let mut resources: Vec<_> =
            clusters.iter().map(|cluster| Resource::encode(Kind::Cluster, &cluster.name, cluster)).collect();
        let anys = resources
            .iter()
            .map(|resource| Any { type_url: Kind::Cluster.url().into(), value: resource.body.to_vec() })
            .collect();
        let shared = EncodedSequence::encode(form, resources.split_off(2).iter(), None);
        let removed = if form == Form::Delta { vec!["gone".into()] } else { Vec::new() };
        (Push { form, kind: Kind::Cluster, number: 7, resources, shared, removed }, anys)
    }

    /// Returns the message as a gRPC client reads it.
    fn message(push: &Push) -> Vec<u8> {
        let pieces = push.clone().encode(NonceText::of(&[b"7-nonce"]));
        let length = pieces.message_len();
        let bytes = pieces.collect::<Vec<_>>().concat();
        assert_eq!(bytes[0], NOT_COMPRESSED);
        assert_eq!(bytes[1..5], u32::try_from(length).unwrap().to_be_bytes());
        assert_eq!(bytes.len(), 5 + length);
        bytes[5..].to_vec()
    }

    #[test]
    fn encoding_is_lazy() {
        let body = Bytes::from(vec![b'x'; BY_REFERENCE - 1]);
        let all =
            (0..1_000).map(|number| Resource::from_body(Kind::Cluster, &number.to_string(), body.clone()));
        let (push, _) = push(Form::Delta);
        let mut pieces = Push { resources: all.collect(), ..push }.encode(NonceText::of(&[b"7-nonce"]));
        let (length, mut taken) = (pieces.message_len(), 0);
        for number in 1.. {
            let Some(piece) = pieces.next() else { break };
            taken += piece.len();
            assert!(
                piece.len() <= PIECE_LENGTH + 2 * BY_REFERENCE
                    && pieces.next <= number * PIECE_LENGTH / BY_REFERENCE + 10
            );
        }
        assert_eq!(taken, 5 + length);
    }

    #[test]
    fn an_encoded_sequence_reuses_unchanged_parts() {
        let resource = |number: usize, length| {
            let body = Bytes::from(vec![b'x'; length]);
            Resource::from_body(
                Kind::Cluster,
                &format!("{number:04}"),
                [&number.to_be_bytes()[..], &body].concat().into(),
            )
        };
        let bytes =
            |row: &EncodedSequence| row.parts.iter().flat_map(|part| part.bytes.to_vec()).collect::<Vec<_>>();
        let mut resources: Vec<_> = (0..3_000).map(|number| resource(number, 700)).collect();
        let former = EncodedSequence::encode(Form::Delta, resources.iter(), None);
        resources[1_500] = resource(1_500, 701);
        resources.remove(100);
        resources.insert(2_000, resource(9_999, 700));
        let row = EncodedSequence::encode(Form::Delta, resources.iter(), Some(&former));

        let alone = EncodedSequence::encode(Form::Delta, resources.iter(), None);
        assert_eq!((row.count, row.length), (3_000, alone.length));
        assert!(bytes(&row) == bytes(&alone), "it is encoded as without a former sequence");
        let own = row.own_bytes(&former);
        assert!(own <= 6 * (MIN_PART + 1_000), "{own} bytes of {} for three changes", row.length);
    }

    #[test]
    fn an_incremental_push_decodes_as_a_delta_response() {
        let (push, anys) = push(Form::Delta);
        assert_eq!(push.count(), 3);
        let bytes = message(&push);
        let read = DeltaDiscoveryResponse::decode(&*bytes).unwrap();
        assert_eq!(
            (read.type_url.as_str(), read.nonce.as_str(), read.system_version_info.as_str()),
            (Kind::Cluster.url(), "7-nonce", "7")
        );
        assert_eq!(read.removed_resources, ["gone"]);
        let names: Vec<_> = read.resources.iter().map(|resource| resource.name.as_str()).collect();
        assert_eq!(names, ["a", "outbound|80||b", "c"]);
        for (read, any) in read.resources.iter().zip(anys) {
            let sent = Resource::from_body(Kind::Cluster, &read.name, any.value.clone().into());
            assert_eq!(read.version, sent.version_text());
            assert_eq!(read.resource, Some(any));
        }
        let raw = DeltaResponse::decode(&*bytes).unwrap();
        assert_eq!(raw.resources.len(), 3);
        let body = &raw.resources[1].resource.as_ref().unwrap().value;
        assert_eq!(name_of(Kind::Cluster, body).unwrap(), "outbound|80||b");
    }

    #[test]
    fn a_full_push_decodes_as_a_discovery_response() {
        let (push, anys) = push(Form::Sotw);
        let read = DiscoveryResponse::decode(&*message(&push)).unwrap();
        assert_eq!((read.version_info.as_str(), read.nonce.as_str()), ("7", "7-nonce"));
        assert_eq!(read.type_url, Kind::Cluster.url());
        assert_eq!(read.resources, anys);
    }
}
