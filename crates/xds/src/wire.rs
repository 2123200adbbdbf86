//! Discovery responses as bytes.
//!
//! Envoy's generated types would copy each resource's body into a vector, and its type URL and name into
//! strings, for every stream it is sent on. Here a response refers to shared resources and is written straight
//! into the stream's buffer; on the way in, bodies stay slices of what was received.

use std::sync::Arc;

use bytes::{BufMut, Bytes};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint},
};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use crate::resource::{Kind, Resource};

/// The aggregated service's method for each form.
pub(crate) const DELTA: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
pub(crate) const SOTW: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// The aggregated service's name.
pub(crate) const SERVICE: &str = "envoy.service.discovery.v3.AggregatedDiscoveryService";
/// A whole mesh in one response must fit; the default of 4 MiB holds some 2,000 services.
pub(crate) const MAX_MESSAGE: usize = 512 << 20;

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
    pub(crate) nonce: u64,
    pub(crate) resources: Vec<Arc<Resource>>,
    /// Delta only.
    pub(crate) removed: Vec<Arc<str>>,
}

impl Push {
    /// Writes the `DeltaDiscoveryResponse` or `DiscoveryResponse`.
    pub(crate) fn encode(&self, out: &mut impl BufMut) {
        let nonce = self.nonce.to_string();
        text(1, &nonce, out);
        for resource in &self.resources {
            let any = any_len(resource);
            match self.form {
                Form::Sotw => header(2, any, out),
                Form::Delta => {
                    let version = resource.version_text();
                    let entry = text_len(&version) + text_len(&resource.name) + nested_len(any);
                    header(2, entry, out);
                    text(1, &version, out);
                    text(3, &resource.name, out);
                    header(2, any, out);
                }
            }
            text(1, resource.kind.url(), out);
            header(2, resource.body.len(), out);
            out.put_slice(&resource.body);
        }
        text(4, self.kind.url(), out);
        text(5, &nonce, out);
        for name in &self.removed {
            text(6, name, out);
        }
    }
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

fn header(field: u32, length: usize, out: &mut impl BufMut) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(length as u64, out);
}

fn text(field: u32, text: &str, out: &mut impl BufMut) {
    header(field, text.len(), out);
    out.put_slice(text.as_bytes());
}

/// gRPC codec of the server: requests of type `R` in, pushes out.
pub(crate) struct PushCodec<R>(std::marker::PhantomData<R>);

impl<R> Default for PushCodec<R> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<R: Message + Default + Send + 'static> Codec for PushCodec<R> {
    type Encode = Push;
    type Decode = R;
    type Encoder = PushEncoder;
    type Decoder = RequestDecoder<R>;

    fn encoder(&mut self) -> PushEncoder {
        PushEncoder
    }

    fn decoder(&mut self) -> RequestDecoder<R> {
        RequestDecoder(std::marker::PhantomData)
    }
}

pub(crate) struct PushEncoder;

impl Encoder for PushEncoder {
    type Item = Push;
    type Error = Status;

    fn encode(&mut self, push: Push, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(push.resources.iter().map(|resource| any_len(resource) + 64).sum::<usize>() + 128);
        push.encode(buffer);
        Ok(())
    }
}

pub(crate) struct RequestDecoder<R>(std::marker::PhantomData<R>);

impl<R: Message + Default> Decoder for RequestDecoder<R> {
    type Item = R;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<R>, Status> {
        R::decode(buffer).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
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
    use envoy_types::pb::{
        envoy::{
            config::cluster::v3::Cluster,
            service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse},
        },
        google::protobuf::Any,
    };

    use super::*;

    fn push(form: Form) -> (Push, Vec<Any>) {
        let clusters =
            ["a", "outbound|80||b"].map(|name| Cluster { name: name.into(), ..Cluster::default() });
        let resources: Vec<_> =
            clusters.iter().map(|cluster| Resource::encode(Kind::Cluster, &cluster.name, cluster)).collect();
        let anys = resources
            .iter()
            .map(|resource| Any { type_url: Kind::Cluster.url().into(), value: resource.body.to_vec() })
            .collect();
        (Push { form, kind: Kind::Cluster, nonce: 7, resources, removed: vec!["gone".into()] }, anys)
    }

    #[test]
    fn a_delta_push_is_a_delta_response() {
        let (push, anys) = push(Form::Delta);
        let mut bytes = Vec::new();
        push.encode(&mut bytes);
        let read = DeltaDiscoveryResponse::decode(&*bytes).unwrap();
        assert_eq!(
            (read.type_url.as_str(), read.nonce.as_str(), read.system_version_info.as_str()),
            (Kind::Cluster.url(), "7", "7")
        );
        assert_eq!(read.removed_resources, ["gone"]);
        for ((read, sent), any) in read.resources.iter().zip(&push.resources).zip(anys) {
            assert_eq!(read.name, *sent.name);
            assert_eq!(read.version, sent.version_text());
            assert_eq!(read.resource, Some(any));
        }
        let raw = DeltaResponse::decode(&*bytes).unwrap();
        assert_eq!(raw.resources.len(), 2);
        let body = &raw.resources[1].resource.as_ref().unwrap().value;
        assert_eq!(name_of(Kind::Cluster, body).unwrap(), "outbound|80||b");
    }

    #[test]
    fn a_full_push_is_a_discovery_response() {
        let (mut push, anys) = push(Form::Sotw);
        push.removed.clear();
        let mut bytes = Vec::new();
        push.encode(&mut bytes);
        let read = DiscoveryResponse::decode(&*bytes).unwrap();
        assert_eq!((read.version_info.as_str(), read.nonce.as_str()), ("7", "7"));
        assert_eq!(read.type_url, Kind::Cluster.url());
        assert_eq!(read.resources, anys);
    }
}
