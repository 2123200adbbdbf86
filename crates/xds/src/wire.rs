//! Discovery responses as bytes.
//!
//! Envoy's generated types would copy each resource's body into a vector, and its type URL and name into
//! strings, for every stream it is sent on. Here a response is made of pieces that all streams share, between a few bytes of
//! its own; on the way in, bodies stay slices of what was received.

use std::{collections::HashMap, sync::Arc};

use bytes::{BufMut, Bytes, BytesMut};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint},
};

use crate::{kind::Kind, resource::Resource};

/// The aggregated service's method for each form.
pub(crate) const DELTA: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
pub(crate) const SOTW: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// A whole mesh in one response must fit; the default of 4 MiB holds some 2,000 services.
pub(crate) const MAX_MESSAGE: usize = 512 << 20;
/// The first byte of a gRPC message.
const NOT_COMPRESSED: u8 = 0;
/// Bodies of this length are not copied. In bytes.
const BY_REFERENCE: usize = 4 << 10;
/// So much is copied into one piece of a response. In bytes.
const COPIED: usize = 32 << 10;
/// A part of a row is at least so long, unless the resource with which it ends has a version that is a multiple of `PART_RESOURCES`.
const PART: usize = 64 << 10;
const PART_RESOURCES: u64 = 64;
/// How our server calls itself, in the first response of a stream: who reads it may ask for virtual hosts by authority.
const SERVER: &str = "skysail";
/// How long [`Resource::version_text`] is.
const VERSION_LEN: usize = 16;

/// Which form of the protocol a stream speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// What changed since the last response.
    Delta,
    /// All resources of a kind, or of the names asked for.
    Sotw,
}

/// A response on its way out.
#[derive(Clone, Debug)]
pub(crate) struct Push {
    pub(crate) form: Form,
    pub(crate) kind: Kind,
    /// Its number on the stream, from 1.
    pub(crate) number: u64,
    pub(crate) resources: Vec<Arc<Resource>>,
    /// More resources, which others are sent as well.
    pub(crate) together: Entries,
    /// Delta only.
    pub(crate) removed: Vec<Arc<str>>,
}

/// A row of resources as it stands in a response: encoded once for all who are sent the same.
///
/// Its parts are shared with the row of which it is a change, so a client that reads slowly holds of a former row what has changed
/// since, instead of all of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entries {
    pub(crate) count: usize,
    /// In bytes.
    length: usize,
    parts: Arc<[Arc<Part>]>,
}

/// Successive resources of a row.
#[derive(Debug)]
struct Part {
    resources: Box<[Arc<Resource>]>,
    bytes: Bytes,
}

impl Entries {
    /// Encodes a row. Parts that `former`, of the same form, has too are taken from it.
    pub(crate) fn encode<'a>(
        form: Form,
        resources: impl Iterator<Item = &'a Arc<Resource>>,
        former: Option<&Self>,
    ) -> Self {
        let resources: Vec<_> = resources.map(Arc::clone).collect();
        let first = |part: &[Arc<Resource>]| part.first().map(Arc::as_ptr);
        let former = former.iter().flat_map(|row| row.parts.iter());
        let former: HashMap<_, _> = former.map(|part| (first(&part.resources), part)).collect();
        // Where a part ends depends on its resources alone, so that a change moves the ends of few parts.
        let mut length = 0;
        let ends = |resource: &Arc<Resource>| {
            length += nested_len(entry_len(form, resource));
            let ends = length >= PART || resource.version.is_multiple_of(PART_RESOURCES);
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

    /// How many bytes are not shared with another row.
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

impl Push {
    /// How many resources it brings.
    pub(crate) fn count(&self) -> usize {
        self.resources.len() + self.together.count
    }

    fn is_first(&self) -> bool {
        self.form == Form::Delta && self.number == 1
    }

    /// The `DeltaDiscoveryResponse` or `DiscoveryResponse` as a gRPC message.
    pub(crate) fn encode(self, nonce: String) -> Pieces {
        let copied = |resource: &&Arc<Resource>| resource.body.len() < BY_REFERENCE;
        let copies: usize = self.resources.iter().filter(copied).map(|resource| resource.body.len()).sum();
        let room = 256 + 160 * self.resources.len() + 64 * self.removed.len() + copies;
        let entries = self.resources.iter().map(|resource| nested_len(entry_len(self.form, resource)));
        let removed = self.removed.iter().map(|name| text_len(name));
        let length = entries.chain(removed).sum::<usize>()
            + self.together.length
            + text_len(&self.number.to_string())
            + text_len(&nonce)
            + text_len(self.kind.url())
            + if self.is_first() { nested_len(text_len(SERVER)) } else { 0 };
        Pieces { push: self, nonce, length, room, next: 0, open: BytesMut::new(), body: None }
    }
}

/// A response that is encoded as far as it is taken, so that a client that reads slowly holds no more than references to resources.
/// Of what is long no copy is made.
#[derive(Debug)]
pub(crate) struct Pieces {
    push: Push,
    nonce: String,
    length: usize,
    /// What is still to be copied, about. In bytes.
    room: usize,
    /// The part that comes next.
    next: usize,
    /// What is being written.
    open: BytesMut,
    /// A body that follows what was taken last.
    body: Option<Bytes>,
}

impl Pieces {
    /// The length of the message, without gRPC's prefix.
    pub(crate) fn message_len(&self) -> usize {
        self.length
    }

    /// Writes the next part, except for a body that is not copied; false if there are no more.
    fn write(&mut self) -> bool {
        let Push { form, kind, number, resources, together, removed } = &self.push;
        let out = &mut self.open;
        let part = self.next;
        self.next += 1;
        if part == 0 {
            out.put_u8(NOT_COMPRESSED);
            // Longer messages cannot be received by anybody.
            out.put_u32(u32::try_from(self.length).unwrap_or(u32::MAX));
            text(1, &number.to_string(), out);
            text(4, kind.url(), out);
            text(5, &self.nonce, out);
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
        } else if let Some(part) = together.parts.get(part - resources.len() - 1) {
            self.body = Some(part.bytes.clone());
        } else if let Some(name) = removed.get(part - resources.len() - together.parts.len() - 1) {
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
            self.open.reserve(self.room.min(COPIED + BY_REFERENCE));
        }
        while self.open.len() < COPIED && self.body.is_none() && self.write() {}
        self.room = self.room.saturating_sub(self.open.len());
        if self.open.is_empty() { self.body.take() } else { Some(self.open.split().freeze()) }
    }
}

/// The length of a resource in a response, without its own key and length.
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
        text(1, &resource.version_text(), out);
        text(3, &resource.name, out);
        header(2, any_len(resource), out);
    }
    text(1, resource.kind.url(), out);
    header(2, resource.body.len(), out);
}

/// The length of a resource's `Any`. An empty body is written too, which is as good as left out.
fn any_len(resource: &Resource) -> usize {
    text_len(resource.kind.url()) + nested_len(resource.body.len())
}

/// All fields here have numbers below 16, so a key is one byte.
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
    header(field, text.len(), out);
    out.put_slice(text.as_bytes());
}

/// `DeltaDiscoveryRequest` with what is looked at of it. The node is decoded in a stream's first request only.
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

/// `DiscoveryRequest`, likewise.
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

/// `DeltaDiscoveryResponse` on its way in.
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
    /// Whether our own server says that it is.
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

/// `DiscoveryResponse` on its way in.
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

/// `google.protobuf.Any` that is not copied.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RawAny {
    #[prost(string, tag = "1")]
    pub(crate) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) value: Bytes,
}

/// The name in a resource's body: all kinds have it in field 1, except for the name table, of which there is one.
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

    /// A push of three resources in each of the ways they can go: copied, by reference, and together.
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
        let together = Entries::encode(form, resources.split_off(2).iter(), None);
        let removed = if form == Form::Delta { vec!["gone".into()] } else { Vec::new() };
        (Push { form, kind: Kind::Cluster, number: 7, resources, together, removed }, anys)
    }

    /// What a gRPC client reads.
    fn message(push: &Push) -> Vec<u8> {
        let pieces = push.clone().encode("7-nonce".into());
        let length = pieces.message_len();
        let bytes = pieces.collect::<Vec<_>>().concat();
        assert_eq!(bytes[0], NOT_COMPRESSED);
        assert_eq!(bytes[1..5], u32::try_from(length).unwrap().to_be_bytes());
        assert_eq!(bytes.len(), 5 + length);
        bytes[5..].to_vec()
    }

    #[test]
    fn no_more_is_encoded_than_is_taken() {
        let body = Bytes::from(vec![b'x'; BY_REFERENCE - 1]);
        let all =
            (0..1_000).map(|number| Resource::from_body(Kind::Cluster, &number.to_string(), body.clone()));
        let (push, _) = push(Form::Delta);
        let mut pieces = Push { resources: all.collect(), ..push }.encode("7-nonce".into());
        let (length, mut taken) = (pieces.message_len(), 0);
        for number in 1.. {
            let Some(piece) = pieces.next() else { break };
            taken += piece.len();
            assert!(
                piece.len() <= COPIED + 2 * BY_REFERENCE
                    && pieces.next <= number * COPIED / BY_REFERENCE + 10
            );
        }
        assert_eq!(taken, 5 + length);
    }

    #[test]
    fn a_row_takes_from_the_former_one_what_did_not_change() {
        let resource = |number: usize, length| {
            let body = Bytes::from(vec![b'x'; length]);
            Resource::from_body(
                Kind::Cluster,
                &format!("{number:04}"),
                [&number.to_be_bytes()[..], &body].concat().into(),
            )
        };
        let bytes = |row: &Entries| row.parts.iter().flat_map(|part| part.bytes.to_vec()).collect::<Vec<_>>();
        let mut resources: Vec<_> = (0..3_000).map(|number| resource(number, 700)).collect();
        let former = Entries::encode(Form::Delta, resources.iter(), None);
        resources[1_500] = resource(1_500, 701);
        resources.remove(100);
        resources.insert(2_000, resource(9_999, 700));
        let row = Entries::encode(Form::Delta, resources.iter(), Some(&former));

        let alone = Entries::encode(Form::Delta, resources.iter(), None);
        assert_eq!((row.count, row.length), (3_000, alone.length));
        assert!(bytes(&row) == bytes(&alone), "it is encoded as without a former row");
        let own = row.own_bytes(&former);
        assert!(own <= 6 * (PART + 1_000), "{own} bytes of {} for three changes", row.length);
    }

    #[test]
    fn a_delta_push_is_a_delta_response() {
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
    fn a_full_push_is_a_discovery_response() {
        let (push, anys) = push(Form::Sotw);
        let read = DiscoveryResponse::decode(&*message(&push)).unwrap();
        assert_eq!((read.version_info.as_str(), read.nonce.as_str()), ("7", "7-nonce"));
        assert_eq!(read.type_url, Kind::Cluster.url());
        assert_eq!(read.resources, anys);
    }
}
