//! gRPC's messages as they stand on a stream. No more memory is held than there is of a message that has begun: streams are
//! thousands, and say little.

use std::{marker::PhantomData, sync::Arc};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::RecvStream;
use prost::{
    Message,
    encoding::{DecodeContext, decode_key, skip_field},
};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Extensions, Status};

use crate::limits::{self, Account, Bound, Identity, Incomplete};

/// Whether a message is compressed, and how long it is.
const PREFIX: usize = 5;

/// A message with what goes before it.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    // Longer messages cannot be received by anybody.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// The requests of a call, each a message `R`.
pub(crate) struct Requests<R> {
    stream: RecvStream,
    begun: Begun,
    /// The longest that is read, in bytes.
    most: usize,
    account: Arc<Account>,
    incomplete: Incomplete,
    /// When the request that has begun must be complete.
    until: Option<Instant>,
    kind: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Requests<R> {
    /// The requests on a stream, of at most so many bytes each, from whom the call's extensions say.
    pub(crate) fn new(
        stream: RecvStream,
        most: usize,
        account: &Arc<Account>,
        extensions: &Extensions,
    ) -> Self {
        let identity = extensions.get::<Identity>().cloned();
        let incomplete = Incomplete::new(Arc::clone(account), identity);
        let account = Arc::clone(account);
        Self { stream, begun: Begun::default(), most, account, incomplete, until: None, kind: PhantomData }
    }

    /// The next request and its length; `None` when the client has no more. May be dropped and called again. Waits while the
    /// connection owes too much.
    pub(crate) async fn next(&mut self) -> Result<Option<(R, usize)>, Status> {
        if self.account.pace.wait().is_some() {
            self.suspend();
            self.account.paced().await;
        }
        loop {
            let before = self.begun.0.len();
            if let Some(request) = self.begun.complete(self.most).map_err(|status| self.refused(status))? {
                self.incomplete.set(0)?;
                self.until = None;
                return Ok(Some((request, before - self.begun.0.len())));
            }
            self.incomplete.set(before)?;
            let Some(data) = self.data().await? else { return Ok(None) };
            let data = data.map_err(broken)?;
            self.stream.flow_control().release_capacity(data.len()).map_err(broken)?;
            // The connection was charged for it as for any other byte.
            self.account.pace.refund((limits::FRAME_BYTE - 1) * data.len() as u64);
            self.begun.0.extend_from_slice(&data);
        }
    }

    /// Gives a request that has begun its time anew, as it is not read for now.
    pub(crate) fn suspend(&mut self) {
        self.until = None;
    }

    /// What comes next. Fails if a request has begun and is not completed in time.
    async fn data(&mut self) -> Result<Option<Result<Bytes, h2::Error>>, Status> {
        if self.begun.0.is_empty() {
            return Ok(self.stream.data().await);
        }
        loop {
            let until = *self.until.get_or_insert_with(|| Instant::now() + limits::REST);
            if let Ok(data) = timeout_at(until, self.stream.data()).await {
                return Ok(data);
            }
            // What has come is not read while the connection owes too much.
            if self.account.pace.wait().is_none() {
                let what = format!("a request was not complete after {:?}", limits::REST);
                return Err(self.account.limits.exhausted(Bound::Incomplete, &self.account.client, what));
            }
            self.suspend();
        }
    }

    fn refused(&self, status: Status) -> Status {
        if status.code() == Code::ResourceExhausted {
            self.account.limits.note(Bound::Request, &self.account.client);
        }
        status
    }
}

fn broken(error: h2::Error) -> Status {
    Status::cancelled(error.to_string())
}

/// What has come of the next message.
#[derive(Default)]
pub(crate) struct Begun(pub(crate) BytesMut);

impl Begun {
    /// Takes out the next message, if all of it is there.
    pub(crate) fn complete<R: Message + Default>(&mut self, most: usize) -> Result<Option<R>, Status> {
        let Some((prefix, content)) = self.0.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [compressed, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        if compressed != 0 {
            return Err(Status::unimplemented(
                "the request is compressed, which no answer said was possible",
            ));
        }
        if length > most {
            return Err(Status::resource_exhausted(format!(
                "a request of {length} bytes; the limit is {most}"
            )));
        }
        let Some(content) = content.get(..length) else { return Ok(None) };
        check_fields(content)?;
        let request = R::decode(content).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.0.advance(PREFIX + length);
        if self.0.is_empty() {
            self.0 = BytesMut::new();
        }
        Ok(Some(request))
    }
}

/// Refuses a message of too many fields, before memory is allocated for them.
fn check_fields(mut message: &[u8]) -> Result<(), Status> {
    // Each takes two bytes.
    if message.len() < 2 * limits::FIELDS {
        return Ok(());
    }
    let mut fields = 0;
    while !message.is_empty() {
        let skip = |message: &mut &[u8]| {
            let (field, kind) = decode_key(message)?;
            skip_field(kind, field, message, DecodeContext::default())
        };
        skip(&mut message).map_err(|error| Status::invalid_argument(error.to_string()))?;
        fields += 1;
    }
    if fields <= limits::FIELDS {
        return Ok(());
    }
    let most = limits::FIELDS;
    Err(Status::resource_exhausted(format!("a request of {fields} fields; the limit is {most}")))
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

    use super::*;

    fn request(nonce: &str) -> Bytes {
        framed(&DeltaDiscoveryRequest { response_nonce: nonce.into(), ..DeltaDiscoveryRequest::default() })
    }

    /// Requests that come in pieces of this length.
    fn read(bytes: &[u8], piece: usize) -> Vec<Result<String, tonic::Code>> {
        let mut begun = Begun::default();
        let mut read = Vec::new();
        for piece in bytes.chunks(piece) {
            begun.0.extend_from_slice(piece);
            loop {
                match begun.complete::<DeltaDiscoveryRequest>(1 << 20) {
                    Ok(None) => break,
                    Ok(Some(request)) => read.push(Ok(request.response_nonce)),
                    Err(status) => {
                        read.push(Err(status.code()));
                        return read;
                    }
                }
            }
        }
        read
    }

    #[test]
    fn requests_are_read_in_pieces_of_any_length() {
        let bytes = [request("1"), request(""), request("three")].concat();
        for piece in 1..=bytes.len() {
            let expected = ["1", "", "three"].map(|nonce| Ok(nonce.to_owned()));
            assert_eq!(read(&bytes, piece), expected, "in pieces of {piece}");
        }
        assert_eq!(read(&bytes[..bytes.len() - 1], 7).len(), 2, "the last is not complete");
    }

    #[test]
    fn a_request_of_too_many_fields_is_not_decoded() {
        let names = |count| DeltaDiscoveryRequest {
            resource_names_subscribe: vec![String::new(); count],
            ..DeltaDiscoveryRequest::default()
        };
        assert_eq!(read(&framed(&names(limits::FIELDS)), usize::MAX), [Ok(String::new())]);
        assert_eq!(read(&framed(&names(limits::FIELDS + 1)), usize::MAX), [Err(Code::ResourceExhausted)]);
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert_eq!(read(&[1, 0, 0, 0, 0], 5), [Err(tonic::Code::Unimplemented)]);
        assert_eq!(read(&[0, 0xff, 0, 0, 0], 5), [Err(tonic::Code::ResourceExhausted)]);
        assert_eq!(read(&[0, 0, 0, 0, 1, 0xff], 6), [Err(tonic::Code::InvalidArgument)]);
    }
}
