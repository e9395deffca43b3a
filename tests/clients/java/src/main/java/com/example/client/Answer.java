package com.example.client;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import unbroken.v1.Delta;
import unbroken.v1.FinishReason;

/** The part of one choice that has been received so far. */
final class Answer {
  private final List<Integer> tokenIds = new ArrayList<>();
  private final StringBuilder text = new StringBuilder();
  private FinishReason finishReason = FinishReason.FINISH_REASON_UNSPECIFIED;

  void add(Delta delta) {
    tokenIds.addAll(delta.getTokenIdsList());
    text.append(delta.getText());
    if (delta.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED) {
      finishReason = delta.getFinishReason();
    }
  }

  List<Integer> tokenIds() {
    return tokenIds;
  }

  Map<String, Object> fields() {
    return Map.of("token_ids", tokenIds, "text", text.toString(), "finish_reason", finishReason.name());
  }
}
