"""One message, to the right customer, with the right day; a judge says whether it is kind."""

from claw_eval.graders.base import AbstractGrader
from claw_eval.models.trace import DimensionScores


class LateParcelGrader(AbstractGrader):
    def grade(
        self, messages, dispatches, task, audit_data=None, judge=None, media_events=None, env_snapshot=None
    ) -> DimensionScores:
        scores = DimensionScores(robustness=self.compute_robustness(dispatches))
        sent = self.get_service_actions(audit_data, "mail", "sent")
        right = [mail for mail in sent if mail["to"] == "ida@example.org" and "2031-05-14" in mail["body"]]
        if len(sent) != 1 or not right:
            return scores
        kindness = judge.evaluate_actions(task.prompt.text, right[0]["body"], task.judge_rubric)
        scores.completion = 0.6 + 0.4 * kindness.score
        said = judge.evaluate(
            task.prompt.text, self.format_conversation(messages), self.summarize_actions(audit_data), task.judge_rubric
        )
        scores.communication = said.score
        return scores
