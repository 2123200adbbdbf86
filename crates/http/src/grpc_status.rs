//! gRPC statuses in header fields, and their relation to HTTP statuses.

use crate::head::Headers;

/// Returns the gRPC status in the fields of a response's head or trailers.
#[inline]
pub fn in_fields(fields: &Headers) -> Option<u32> {
    std::str::from_utf8(fields.header("grpc-status")?).ok()?.parse().ok()
}

/// Returns the gRPC status for an HTTP status. Source: gRPC, "HTTP to gRPC Status Code Mapping".
#[inline]
pub fn from_http(http: u16) -> u32 {
    match http {
        400 => 13,
        401 => 16,
        403 => 7,
        404 => 12,
        429 | 502..=504 => 14,
        _ => 2,
    }
}

/// Returns the HTTP status for a gRPC status.
pub fn to_http(grpc: u32) -> u16 {
    match grpc {
        0 => 200,
        1 => 499,
        3 | 9 | 11 => 400,
        4 => 504,
        5 => 404,
        6 | 10 => 409,
        7 => 403,
        8 => 429,
        12 => 501,
        14 => 503,
        16 => 401,
        _ => 500,
    }
}
