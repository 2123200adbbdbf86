//! Frames for the control of the connection or of a stream.

use super::{ALIVE, LEAVING, ROOM, Role, Session, StreamError, receive::Fatal};
use crate::http2::frame::{self, ACK, FrameKind, Head, MAX_FRAME, MAX_WINDOW, Reason};

/// Maximum number of settings in a frame, as in Envoy (nghttp2). Eight are defined.
const MAX_SETTINGS: usize = 32;

impl Session {
    pub(super) fn settings(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        if !payload.len().is_multiple_of(6) || (head.has(ACK) && !payload.is_empty()) {
            return Err(Reason::FRAME_SIZE);
        }
        if head.has(ACK) {
            return self.count_useless_frame();
        }
        self.adopt(payload)?;
        self.peer.settled = true;
        frame::head(&mut self.out, FrameKind::Settings, ACK, 0, 0);
        self.count_reply()
    }

    /// Applies a peer's settings. Each value is checked. Of several initial windows only the last is applied, so that
    /// the streams are visited once (CVE-2020-11080).
    pub(super) fn adopt(&mut self, settings: &[u8]) -> Result<(), Fatal> {
        if settings.len() / 6 > MAX_SETTINGS {
            return Err(Reason::ENHANCE_YOUR_CALM);
        }
        let mut window = self.peer.window;
        for (id, value) in frame::each_setting(settings) {
            match id {
                1 => self.encoder.resize(value as usize),
                2 if value > 1 || (value == 1 && self.role == Role::Client) => return Err(Reason::PROTOCOL),
                3 => self.peer.streams = value,
                4 if i64::from(value) > MAX_WINDOW => return Err(Reason::FLOW_CONTROL),
                4 => window = i64::from(value),
                5 => {
                    if !(MAX_FRAME..1 << 24).contains(&(value as usize)) {
                        return Err(Reason::PROTOCOL);
                    }
                    // Larger frames would only delay the other streams.
                    self.peer.frame = MAX_FRAME;
                }
                8 if value > 1 || (value == 0 && self.peer.connect) => return Err(Reason::PROTOCOL),
                8 => self.peer.connect = value == 1,
                _ => {}
            }
        }
        self.set_window(window)
    }

    /// Adjusts the windows of all streams to a new initial window (section 6.9.2).
    fn set_window(&mut self, window: i64) -> Result<(), Fatal> {
        let change = window - self.peer.window;
        if change == 0 {
            return Ok(());
        }
        self.count_stream_visits()?;
        self.peer.window = window;
        for stream in self.streams.values_mut() {
            if !stream.widen(change, &mut self.wakes) {
                return Err(Reason::FLOW_CONTROL);
            }
        }
        Ok(())
    }

    pub(super) fn window_update(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if payload.len() != 4 {
            return Err(Reason::FRAME_SIZE);
        }
        let count = i64::from(frame::number(payload)? & 0x7fff_ffff);
        self.count_useless_frame()?;
        if head.stream == 0 {
            self.send_window += count;
            return match count {
                0 => Err(Reason::PROTOCOL),
                _ if self.send_window > MAX_WINDOW => Err(Reason::FLOW_CONTROL),
                // `written` wakes the streams after all input has been processed.
                _ => Ok(()),
            };
        }
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL);
        }
        let Some(stream) = self.streams.get_mut(&head.stream).filter(|stream| stream.error.is_none()) else {
            return Ok(());
        };
        if count == 0 {
            return self.break_stream(head.stream, Reason::PROTOCOL);
        }
        if !stream.widen(count, &mut self.wakes) {
            return self.break_stream(head.stream, Reason::FLOW_CONTROL);
        }
        Ok(())
    }

    pub(super) fn reset_by_peer(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL);
        }
        if payload.len() != 4 {
            return Err(Reason::FRAME_SIZE);
        }
        let reason = Reason(frame::number(payload)?);
        if let Some(stream) = self.streams.get_mut(&head.stream) {
            // After a complete response, a server uses NO_ERROR to stop the rest of the request (section 8.1).
            if self.role == Role::Client && reason == Reason::NONE && stream.received {
                stream.sent = true;
                stream.wake(ROOM, &mut self.wakes);
                self.close_if_ended(head.stream);
                return Ok(());
            }
            let over = stream.closed;
            let why =
                if reason == Reason::REFUSED { StreamError::Unprocessed } else { StreamError::Reset(reason) };
            if !over {
                self.close_stream(head.stream, why);
            }
            if over || self.role == Role::Client {
                return self.count_useless_frame();
            }
        }
        // Limits clients that open streams only to reset them (CVE-2023-44487).
        if self.role == Role::Client || self.resets.take(1) {
            self.count_useless_frame()
        } else {
            Err(Reason::ENHANCE_YOUR_CALM)
        }
    }

    pub(super) fn ping(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        let Ok(content) = <[u8; 8]>::try_from(payload) else { return Err(Reason::FRAME_SIZE) };
        if !head.has(ACK) {
            frame::ping(&mut self.out, ACK, content);
            return self.count_reply();
        }
        if content == ALIVE && !self.answered {
            self.answered = true;
            return Ok(());
        }
        if content == LEAVING {
            self.refuse();
        }
        self.count_useless_frame()
    }

    pub(super) fn go_away(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        if head.stream != 0 {
            return Err(Reason::PROTOCOL);
        }
        if payload.len() < 8 {
            return Err(Reason::FRAME_SIZE);
        }
        let last = frame::number(payload)? & 0x7fff_ffff;
        self.peer_leaves = true;
        if self.role == Role::Client {
            self.count_stream_visits()?;
            let above = self.streams.keys().copied().filter(|id| *id > last).collect::<Vec<_>>();
            for id in above {
                self.close_stream(id, StreamError::Unprocessed);
            }
        }
        self.count_useless_frame()
    }
}
