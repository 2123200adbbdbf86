//! The gRPC calls that Fortio makes: the standard health check, and its own ping.

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;

use crate::{
    args::LoadArgs,
    tally::{Outcome, SERVING},
};

/// Path of the health check (`grpc/health/v1/health.proto`).
pub(crate) const HEALTH: &str = "/grpc.health.v1.Health/Check";
/// Path of Fortio's ping.
pub const PING: &str = "/fgrpc.PingServer/Ping";

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthRequest {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthResponse {
    /// 1: serving.
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

/// `fgrpc.PingMessage`.
#[derive(Clone, PartialEq, Message)]
pub struct PingMessage {
    #[prost(int64, tag = "1")]
    /// Number of the message.
    pub seq: i64,
    /// Time of the sender in nanoseconds.
    #[prost(int64, tag = "2")]
    pub ts: i64,
    #[prost(string, tag = "3")]
    /// Any text.
    pub payload: String,
    #[prost(int64, tag = "4")]
    /// Requested delay of the response in nanoseconds.
    pub delay_nanos: i64,
}

/// Returns the message of the calls, with gRPC's prefix.
pub(crate) fn message(args: &LoadArgs, payload: &[u8]) -> Bytes {
    if args.ping {
        let payload = String::from_utf8_lossy(payload).into_owned();
        frame(&PingMessage { seq: 1, ts: 0, payload, delay_nanos: 0 })
    } else {
        frame(&HealthRequest { service: args.healthservice.clone() })
    }
}

/// Encodes a message with gRPC's prefix: no compression, and the length.
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(5 + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer grows as needed, so encoding cannot fail.
    let _ = message.encode(&mut bytes);
    bytes.freeze()
}

/// Returns the outcome of a call by its status and its message.
pub(crate) fn outcome(is_ping: bool, status: Option<&[u8]>, message: &[u8]) -> Outcome {
    if status != Some(b"0") {
        return Outcome::Named("ERROR");
    }
    if is_ping {
        return Outcome::Named(SERVING);
    }
    let response = message.get(5..).and_then(|message| HealthResponse::decode(message).ok());
    match response.map(|response| response.status) {
        Some(1) => Outcome::Named(SERVING),
        Some(2) => Outcome::Named("NOT_SERVING"),
        _ => Outcome::Named("UNKNOWN"),
    }
}
